"""Follow docs/internals/add-a-quantizer.md: save its file into a copy of the package, run its commands."""

from __future__ import annotations

import json

import pytest
from pages import Followed, Page, Workshop

pytestmark = pytest.mark.slow

PAGE = Page("add-a-quantizer.md")


def test_it_is_probed_and_planned(followed: Followed) -> None:
    assert "absmax 4/8 bit" in followed[0]
    assert "absmax base of 4 bits" in followed[1]


def test_the_loss_falls_and_the_run_continues(shop: Workshop, followed: Followed) -> None:
    assert "resumed  at step 20" in followed[3]
    summary = shop.json("runs/absmax/summary.json")
    assert (summary["status"], summary["steps"]) == ("finished", 30)
    rows = shop.metrics("absmax")
    assert [row["step"] for row in rows] == list(range(1, 31))
    losses = [row["loss"] for row in rows]
    assert losses[0] > losses[19] > losses[29]


def test_adapter_and_checkpoint_name_the_quantizer(shop: Workshop, followed: Followed) -> None:
    assert followed[4].strip()
    spec = shop.json("runs/absmax/adapter/crosstune.json")["quantization"]
    assert (spec["quantizer"], spec["bits"], spec["group_size"]) == ("absmax", 4, 64)
    manifest = shop.json("runs/absmax/checkpoints/step-00000030/manifest.json")
    assert manifest["identity"]["quantization"] == spec


def test_a_quantized_folder_is_written_and_trained_over(shop: Workshop, followed: Followed) -> None:
    assert "none -> absmax" in followed[5] and "finished 5 steps" in followed[6]
    record = shop.json("models/tiny-absmax/crosstune_quantization.json")
    assert (record["spec"]["quantizer"], record["spec"]["bits"]) == ("absmax", 8)
    spec = shop.json("runs/over/adapter/crosstune.json")["quantization"]
    assert (spec["quantizer"], spec["bits"], spec["group_size"]) == ("absmax", 8, 32)
    rows = shop.metrics("over")
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_its_identity_follows_its_constants(shop: Workshop) -> None:
    """Groups count at every bit width, as the file declares no BITS_BY_ROW; kinds and double scales do not exist."""
    code = (
        "from crosstune.core.quantization import QuantSpec, same_quantization\n"
        "def spec(**changed): return QuantSpec(**{'quantizer': 'absmax', 'bits': 8, 'group_size': 64, **changed})\n"
        "print(same_quantization(spec(), spec(group_size=32)), same_quantization(spec(), spec(double=False, kind='int')))"
    )
    assert shop.python(code).split() == ["False", "True"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kind": "nf4"}, "--quant_type does not apply to absmax"),
        ({"bits": 2}, "absmax does not support 2-bit weights"),
        ({"group_size": 48}, "do not divide"),
    ],
)
def test_what_it_lacks_is_refused(shop: Workshop, changed: dict[str, object], words: str) -> None:
    fields = {"quantizer": "absmax", "bits": 4, "group_size": 64} | changed
    code = (
        "from crosstune.core.errors import UserError\n"
        "from crosstune.core.quantization import QuantSpec\n"
        "from crosstune.torch_engine.quantized import open_quantizer\n"
        f"spec = QuantSpec(**{fields!r})\n"
        "try: open_quantizer(spec).check(spec, (64, 64))\n"
        "except UserError as error: print(error.message)"
    )
    assert words in shop.python(code)


def test_other_bits_and_group_sizes_are_probed(shop: Workshop) -> None:
    """A width without a bound of its own takes the next one, and groups of 64 are not everybody's."""
    [code] = PAGE.files().values()
    other = shop.home / "src" / "crosstune" / "torch_engine" / "quant" / "six.py"
    other.write_text(code.replace("BITS = (8, 4)", "BITS = (8, 6)\nGROUP_SIZES = (32,)"), encoding="utf-8")
    try:
        ask = (
            "import json; from crosstune.machines.probe import probe_machine\n"
            "machine = probe_machine(backends=['cpu'], quantizers=['six'])\n"
            "print(json.dumps(machine.backends['cpu'].quantizers))"
        )
        assert json.loads(shop.python(ask).splitlines()[-1]) == {"six": [6, 8]}
    finally:
        other.unlink()
