"""Model folders of several files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from crosstune.models import weights
from crosstune.models.folder import weight_files
from crosstune.torch_engine.results import export


@pytest.mark.parametrize("engine", ["torch", "mlx"])
def test_shards_hold_every_tensor_once(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """A shard is closed by the tensor that reaches its size."""
    monkeypatch.setattr(weights, "SHARD_BYTES", 24)
    if engine == "torch":
        tensors = ((f"layers.{number}.weight", torch.full((2,), float(number))) for number in range(7))
        export.save_model(tmp_path / "out", AutoConfig.from_pretrained(tiny_model), tensors, base=tiny_model)
    else:
        mx = pytest.importorskip("mlx.core", reason="the mlx extra is not installed")
        from crosstune.mlx_engine import save_model

        arrays = {f"layers.{number}.weight": mx.full((2,), float(number)) for number in range(7)}
        save_model.save_arrays(tmp_path / "out", arrays, base=tiny_model)
    shards = [list(weights.read_header(path)[0]) for path in weight_files(tmp_path / "out")]
    assert [len(names) for names in shards] == [3, 3, 1]
    assert {name for names in shards for name in names} == {f"layers.{n}.weight" for n in range(7)}
