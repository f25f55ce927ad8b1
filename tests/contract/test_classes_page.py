"""Run the Python code of docs/reference/classes.md in order, and repeat its measurements."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the classes hand out torch devices and quantize torch models")
pytest.importorskip("peft", reason="comes with the torch extra")
pytest.importorskip("hqq", reason="an extra: pip install 'crosstune[hqq]'")

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "classes.md").read_text(encoding="utf-8")


def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(compile(code, "docs/reference/classes.md", "exec"), names)
    first, *_, context = capsys.readouterr().out.splitlines()
    assert first.startswith(names["manager"].backend_type)
    assert context == str(names["config"].context_length)
    trained = {name for name, p in names["model"].named_parameters() if p.grad is not None}
    assert trained and all("lora_" in name for name in trained)


@pytest.mark.parametrize("heavy_tails", [False, True])
def test_zero_points_that_are_not_rounded_lose_less(heavy_tails: bool) -> None:
    from hqq.core.quantize import Quantizer

    from crosstune.core.quantization import QuantSpec
    from crosstune.torch_engine.quantized import quantize_weight

    torch.manual_seed(0)
    weight = torch.randn(512, 512) * 0.02
    if heavy_tails:
        weight = torch.distributions.StudentT(torch.tensor(4.0)).sample((512, 512)) * 0.02
    spec = QuantSpec(quantizer="hqq", bits=4, group_size=64)
    ours = quantize_weight(weight, spec, torch.float32).dequantize(torch.float32)
    packed, meta = Quantizer.quantize(
        weight, nbits=4, group_size=64, axis=1, round_zero=True, device="cpu", compute_dtype=torch.float32
    )
    rounded = Quantizer.dequantize(packed, meta)
    errors = [float((dense - weight).norm() / weight.norm()) for dense in (ours, rounded)]
    assert errors[0] < errors[1]
    documented = re.findall(r"0\.\d{4}", PAGE.partition("round_zero")[2])
    assert errors == pytest.approx([float(text) for text in documented[2 * heavy_tails :][:2]], abs=1e-3)
