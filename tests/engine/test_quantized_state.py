"""Quantized weights as tensors that torch sees: state dicts, copies, moves, shards, and the library's own numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from crosstune.core.errors import UserError
from crosstune.core.quantization import QuantSpec
from crosstune.torch_engine.quant.hqq import shrink
from crosstune.torch_engine.quantized import QuantLinear, StoredWeight, quantize_weight, restore_weight

KINDS = [
    QuantSpec(quantizer="bnb", bits=4, group_size=64, kind="nf4", double=True),
    QuantSpec(quantizer="bnb", bits=4, group_size=64, kind="nf4", double=False),
    QuantSpec(quantizer="bnb", bits=4, group_size=128, kind="fp4"),
    QuantSpec(quantizer="bnb", bits=8, group_size=64),
    *(QuantSpec(quantizer="hqq", bits=bits, group_size=64) for bits in (8, 4, 3, 2, 1)),
    QuantSpec(quantizer="quanto", bits=8, group_size=64),
    QuantSpec(quantizer="quanto", bits=8, group_size=64, kind="float8"),
    QuantSpec(quantizer="quanto", bits=4, group_size=64),
    QuantSpec(quantizer="quanto", bits=2, group_size=32),
]
SMALL = QuantSpec(quantizer="hqq", bits=4, group_size=64, kind="int")
"""Stands for HQQ with zero points and scales in 8 bits."""
ALL = [*KINDS, SMALL]
ONE_EACH = [KINDS[0], KINDS[3], KINDS[5], KINDS[6], KINDS[9], KINDS[10], SMALL]
"""One for each way of storing."""
DTYPES = [torch.float32, torch.bfloat16]


def name_of(value: Any) -> str | None:
    if isinstance(value, QuantSpec):
        return f"{value.name()}-{value.kind}-{value.double}"
    return None


def random_weight(seed: int, rows: int = 128, columns: int = 256) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def store(weight: torch.Tensor, spec: QuantSpec, dtype: torch.dtype) -> StoredWeight:
    stored = quantize_weight(weight.to(dtype), spec, dtype)
    if spec is not SMALL:
        return stored
    return StoredWeight("hqq", *shrink(stored.tensors(), stored.facts, ["zero", "scale"]))


def make(seed: int, spec: QuantSpec, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    up, down = random_weight(seed), random_weight(seed + 1, 256, 128)
    bias = torch.randn(128, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return nn.Sequential(
        QuantLinear(store(up, spec, dtype), bias), nn.ReLU(), QuantLinear(store(down, spec, dtype), None)
    )


def answer(model: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.no_grad():
        return model(random_weight(9, 5, 256).to(dtype))


def by_library(weight: torch.Tensor, spec: QuantSpec, dtype: torch.dtype) -> torch.Tensor:
    """Quantize and dequantize by the library alone."""
    if spec.quantizer == "bnb":
        import bitsandbytes.functional as bnb

        if spec.bits == 8:
            packed, scale, _ = bnb.int8_vectorwise_quant(weight.half())
            return bnb.int8_vectorwise_dequant(packed, scale).to(dtype)
        packed, state = bnb.quantize_4bit(
            weight, blocksize=spec.group_size, compress_statistics=spec.double, quant_type=spec.kind
        )
        return bnb.dequantize_4bit(packed, state)
    if spec.quantizer == "hqq":
        from hqq.core.quantize import Quantizer

        packed, meta = Quantizer.quantize(
            weight.float(), nbits=spec.bits, group_size=spec.group_size, axis=1, device="cpu"
        )
        meta |= {"scale": meta["scale"].to(dtype), "zero": meta["zero"].to(dtype)}
        return Quantizer.dequantize(packed, meta).to(dtype)
    from optimum import quanto

    kind = quanto.qfloat8 if spec.kind == "float8" else getattr(quanto, f"qint{spec.bits}")
    if spec.bits == 8:
        scale = quanto.AbsmaxOptimizer()(weight, qtype=kind, axis=0)
        stored = quanto.quantize_weight(weight, qtype=kind, axis=0, scale=scale, optimized=False)
    else:
        scale, shift = quanto.MaxOptimizer()(weight, qtype=kind, axis=0, group_size=spec.group_size)
        stored = quanto.quantize_weight(
            weight, qtype=kind, axis=0, scale=scale, shift=shift, group_size=spec.group_size, optimized=False
        )
    return stored.dequantize()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", KINDS, ids=name_of)
def test_dense_weights_are_the_library_s_own(spec: QuantSpec, dtype: torch.dtype) -> None:
    weight = random_weight(0).to(dtype)
    dense = quantize_weight(weight, spec, dtype).dequantize(dtype)
    expected = by_library(weight, spec, dtype)
    if (spec.quantizer, spec.bits) == ("bnb", 8):  # the library multiplies in another order
        torch.testing.assert_close(dense, expected, rtol=3e-7 if dtype == torch.float32 else 0, atol=0)
    else:
        assert torch.equal(dense, expected)


@pytest.mark.parametrize("columns", [96, 352, 37])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_4_bit_blocks_run_on_from_row_to_row(kind: str, columns: int) -> None:
    """Against the codes times the scales of their blocks: the library's own kernel for CPUs is off by 25% where rows are not
    whole blocks."""
    from bitsandbytes.functional import get_4bit_type

    weight = random_weight(0, rows=70, columns=columns)
    spec = QuantSpec(quantizer="bnb", bits=4, group_size=64, kind=kind, double=False)
    stored = quantize_weight(weight, spec, torch.float32)
    tensors, dense = stored.tensors(), stored.dequantize(torch.float32)
    pairs = tensors["packed"].flatten()
    codes = torch.stack([pairs >> 4, pairs & 15], dim=1).flatten().long()[: weight.numel()]
    scales = tensors["absmax"].repeat_interleave(64)[: weight.numel()]
    expected = get_4bit_type(kind, device="cpu")[codes] * scales
    torch.testing.assert_close(dense, expected.reshape(weight.shape), rtol=1e-6, atol=0)
    assert (dense - weight).norm() / weight.norm() < 0.15


@pytest.mark.parametrize("spec", ONE_EACH, ids=name_of)
def test_a_state_dict_holds_everything(spec: QuantSpec, tmp_path: Path) -> None:
    dtype = torch.bfloat16
    model, other, third = make(0, spec, dtype), make(5, spec, dtype), make(7, spec, dtype)
    expected = answer(model, dtype)
    assert not torch.equal(answer(other, dtype), expected)
    other.load_state_dict(model.state_dict())
    assert torch.equal(answer(other, dtype), expected)
    save_file(model.state_dict(), tmp_path / "state.safetensors")
    third.load_state_dict(load_file(tmp_path / "state.safetensors"))
    assert torch.equal(answer(third, dtype), expected)
    for name, tensor in model.state_dict().items():
        assert torch.equal(third.state_dict()[name], tensor), name
        assert third.state_dict()[name].dtype == tensor.dtype, name


@pytest.mark.parametrize("spec", ONE_EACH, ids=name_of)
def test_moves_carry_every_tensor_and_casts_leave_them_alone(spec: QuantSpec) -> None:
    model = make(0, spec)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if ".stored." in name}
    dense = model[0].stored.dequantize(torch.float32)
    model.to(torch.bfloat16).double().half()
    assert model[0].bias.dtype == torch.float16
    for name, tensor in before.items():
        found = model.state_dict()[name]
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), name
    assert torch.equal(model[0].stored.dequantize(torch.float32), dense)
    moved = model.to("meta", torch.float32)
    assert all(tensor.is_meta for tensor in moved[0].stored.tensors().values())
    assert {tensor.dtype for tensor in moved[0].stored.tensors().values()} == {
        tensor.dtype for name, tensor in before.items() if name.startswith("0.") and "_extra" not in name
    }


def test_another_quantization_is_refused_before_anything_is_copied() -> None:
    states = {spec: make(0, spec).state_dict() for spec in ALL}
    bf16 = make(0, KINDS[5], torch.bfloat16).state_dict()
    for spec in (KINDS[0], KINDS[5], SMALL):
        model = make(3, spec)
        expected = answer(model)
        for other, state in [*states.items(), (None, bf16)]:
            if other is not spec:
                with pytest.raises(UserError, match="quantized differently"):
                    model.load_state_dict(state, strict=False)
        assert torch.equal(answer(model), expected)
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})


def test_weights_of_older_folders_are_read() -> None:
    """Format 1: the offset of doubly quantized scales as a JSON number, and quanto's own description."""
    spec = KINDS[0]
    stored = quantize_weight(random_weight(0), spec, torch.float32)
    tensors = stored.tensors()
    offset = float(tensors.pop("nested_offset"))
    facts = {**stored.facts, "kind": "FourBit", "dtype": "float32", "nested_offset": offset}
    again = restore_weight("bnb", tensors, json.loads(json.dumps(facts)))
    assert torch.equal(again.get_extra_state(), stored.get_extra_state())
    assert torch.equal(again.dequantize(torch.float32), stored.dequantize(torch.float32))
    for spec, form, extra in (
        (KINDS[-1], "qint2", {"group_size": "32"}),
        (KINDS[-3], "qfloat8_e4m3fn", {"activation_qtype": "none"}),
    ):
        stored = quantize_weight(random_weight(0), spec, torch.float32)
        tensors = stored.tensors()
        data = tensors.pop("packed").detach()
        tensors["data"] = data.view(torch.float8_e4m3fn) if spec.kind == "float8" else data
        outer = {"qtype": form, "axis": "0", "size": "[128, 256]", "stride": "[256, 1]", **extra}
        packing = {"bits": "2", "size": "[1024, 32]", "stride": "(32, 1)"} if spec.bits < 8 else None
        facts = {"shape": [128, 256], "kind": "QuantoWeight", "outer": outer, "data": packing}
        again = restore_weight("quanto", tensors, facts)
        assert torch.equal(again.get_extra_state(), stored.get_extra_state())
        assert torch.equal(again.dequantize(torch.float32), stored.dequantize(torch.float32))
