"""The identity of a quantization: its forms in files, and the fields that change the numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from manifests import make_manifest
from planned import plan_on

from crosstune.checkpoint.manifest import Manifest
from crosstune.core.errors import UserError
from crosstune.core.quantization import BaseChoice, QuantSpec, read_spec, same_quantization, wrong_spec
from crosstune.runs.resume_identity import base_fields, check_adapter_base, compare, identity_of_options

BNB = {"quantizer": "bnb", "bits": 4, "group_size": 64}
FP8 = {"quantizer": "fp8", "bits": 8, "group_size": 64}
# As checkpoints, adapters of the torch engine and adapters of the MLX engine spelled it.
OLDER = {"backend": "bnb", "bits": 4, "group_size": 64, "type": "auto", "double": True}
MLX_ADAPTER = {"quantizer": "mlx", "bits": 4, "group_size": 64, "kind": "auto", "double": False}
MLX_CHECKPOINT = {"backend": "mlx", "bits": 4, "group_size": 64, "type": "auto", "double": True}


def test_every_spelling_is_read() -> None:
    assert QuantSpec.from_json(OLDER) == QuantSpec(**BNB) == QuantSpec.from_json(QuantSpec(**BNB).to_json())
    assert QuantSpec(**BNB).name() == "bnb-4bit"
    assert read_spec(None) is None
    assert same_quantization(read_spec(MLX_ADAPTER), read_spec(MLX_CHECKPOINT))
    for wrong, why in (
        ({"bits": 4}, "it has the keys bits and lacks group_size, quantizer."),
        ({**BNB, "rounding": "up"}, "it has the keys quantizer, bits, group_size, rounding."),
    ):
        with pytest.raises(UserError, match="cannot be read") as caught:
            QuantSpec.from_json(wrong)
        assert caught.value.why == why


def test_a_quantization_in_words() -> None:
    for spec, words, kind in (
        (BNB, "bnb with 4 bits, groups of 64, kind nf4, scales quantized too", "nf4"),
        ({**BNB, "double": False}, "bnb with 4 bits, groups of 64, kind nf4, plain scales", "nf4"),
        ({**BNB, "quantizer": "hqq", "kind": "nf4"}, "hqq with 4 bits, groups of 64", "int"),
        ({**FP8, "kept": ("a.up", "b.up")}, "fp8 with 8 bits, without 2 layers such as a.up", "float8"),
    ):
        assert (QuantSpec(**spec).describe(), QuantSpec(**spec).resolved_kind()) == (words, kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({**BNB, "kind": "nf4"}, BNB, True),
        ({**BNB, "kind": "fp4"}, BNB, False),
        ({**BNB, "double": False}, BNB, False),
        ({**BNB, "bits": 8, "group_size": 128, "double": False}, {**BNB, "bits": 8}, True),
        ({**BNB, "quantizer": "hqq", "double": False, "kind": "int"}, {**BNB, "quantizer": "hqq"}, True),
        ({**BNB, "quantizer": "mlx", "kind": "nf4"}, {**BNB, "quantizer": "mlx"}, True),
        ({**BNB, "quantizer": "quanto", "bits": 8, "kind": "float8"}, {**BNB, "quantizer": "quanto", "bits": 8}, False),
        # Of a quantizer that has no file here nothing is known, so that every field counts.
        ({**BNB, "quantizer": "other"}, {**BNB, "quantizer": "other"}, True),
        ({**BNB, "quantizer": "other", "double": False}, {**BNB, "quantizer": "other"}, False),
        ({**FP8, "kept": ("a.up", "a.down")}, {**FP8, "kept": ("a.down", "a.up")}, True),
        ({**FP8, "kept": ("a.up",)}, FP8, False),
    ],
)  # fmt: skip
def test_what_changes_the_numbers(one: dict[str, Any], other: dict[str, Any], same: bool) -> None:
    left, right = QuantSpec(**one), QuantSpec(**other)
    assert same_quantization(left, right) == same
    if not same:
        assert left.describe() != right.describe()
    assert not same_quantization(left, None) and same_quantization(None, None)


def test_a_checkpoint_of_an_older_version_is_of_the_same_training() -> None:
    now = {"quantization": QuantSpec(**BNB, kind="nf4").to_json()}
    assert compare({"quantization": OLDER}, now) == []
    [difference] = compare({"quantization": {**OLDER, "group_size": 128}}, now)
    assert difference.kind == "quantization"
    assert "groups of 128" in difference.sentence() and "groups of 64" in difference.sentence()
    [difference] = compare({"quantization": None}, now)
    assert difference.was is None


def test_kept_layers_are_written_only_if_there_are_some() -> None:
    assert "kept" not in QuantSpec(**FP8).to_json() and QuantSpec.from_json(FP8).kept == ()
    spec = QuantSpec(**FP8, kept=("a.up", "b.up"))
    written = json.loads(json.dumps(spec.to_json()))
    assert written["kept"] == ["a.up", "b.up"] and QuantSpec.from_json(written) == spec
    for wrong in ("a.up", [1], {"a.up": True}, None):
        with pytest.raises(UserError, match="cannot be read") as caught:
            QuantSpec.from_json({**FP8, "kept": wrong})
        assert "at kept" in str(caught.value.why)


@pytest.mark.parametrize(
    ("field", "value", "readable"),
    [
        ("bits", 0, False),
        ("bits", 1, True),
        ("bits", 64, True),
        ("bits", 65, False),
        ("group_size", -1, False),
        ("group_size", 0, True),
    ],
)
def test_bits_and_group_sizes_have_bounds(field: str, value: int, readable: bool) -> None:
    assert (wrong_spec({**FP8, field: value}) is None) == readable


def test_a_plan_takes_over_the_base_of_its_own_quantizer_alone() -> None:
    base = BaseChoice(quantizer="fp8", kept=("a.up",), outside_fp8=("layers.0.gate_up",))
    for asked, kept in (({"base_precision": "fp8"}, ("a.up",)), ({"train_type": "qlora"}, ())):
        spec = plan_on("h200", base=base, **asked).quant_spec
        assert spec is not None and spec.kept == kept
    assert plan_on("h200", base=base).base is None
    assert plan_on("h200", base_precision="fp8").quant_spec.kept == ()  # type: ignore[union-attr]


@pytest.mark.parametrize("groups", [None, (), ("layers.1.down", "layers.0.qkv")])
@pytest.mark.parametrize("kept", [(), ("a.down", "a.up")])
def test_a_checkpoint_tells_what_was_decided_about_its_base(
    groups: tuple[str, ...] | None, kept: tuple[str, ...]
) -> None:
    base = BaseChoice(quantizer="fp8", kept=kept, outside_fp8=groups)
    plan = plan_on("h200", base=base, base_precision="fp8")
    manifest = make_manifest(identity=identity_of_options(plan), base=base_fields(plan))
    found = Manifest.from_json(json.loads(json.dumps(manifest.to_json())))
    assert found.base_choice == base
    assert compare(found.identity, identity_of_options(plan)) == []
    # Neither an older version nor a run without fp8 writes the fields, and nothing is known then.
    plain = plan_on("h200", train_type="qlora")
    assert base_fields(plain) == {}
    for other in (plain, plan_on("h200", base_precision="fp8"), plan_on("h200")):
        assert make_manifest(identity=identity_of_options(other)).base_choice is None


def test_a_new_training_over_an_adapter_chooses_its_own_layers(tmp_path: Path) -> None:
    record = {
        "base": {"name": "tiny", "identity": {"version": 2, "sha256": "a" * 64}},
        "quantization": {**FP8, "kept": ["a.up"]},
    }
    (tmp_path / "crosstune.json").write_text(json.dumps(record))
    assert check_adapter_base(tmp_path, identity="a" * 64, quantization=QuantSpec(**FP8)) == []
    [warning] = check_adapter_base(tmp_path, identity="a" * 64, quantization=QuantSpec(**BNB))
    assert "fp8 with 8 bits" in warning


@pytest.mark.parametrize("recorded", [MLX_ADAPTER, MLX_CHECKPOINT, {**MLX_ADAPTER, "double": True}])
def test_an_adapter_goes_on_over_the_base_of_its_record(recorded: dict[str, Any], tmp_path: Path) -> None:
    record = {
        "base": {"name": "tiny", "identity": {"version": 2, "sha256": "a" * 64}},
        "quantization": recorded,
    }
    (tmp_path / "crosstune.json").write_text(json.dumps(record))
    same = QuantSpec(quantizer="mlx", bits=4, group_size=64)
    assert check_adapter_base(tmp_path, identity="a" * 64, quantization=same) == []
    [warning] = check_adapter_base(tmp_path, identity="a" * 64, quantization=None)
    assert "mlx with 4 bits" in warning and "not quantized" in warning
