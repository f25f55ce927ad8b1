"""A quantized weight as plain tensors and JSON, and back, without pickles: one pair of functions for each library."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import torch

from crosstune.torch_engine.quant.bnb import EightBit, FourBit
from crosstune.torch_engine.quant.hqq import HqqWeight
from crosstune.torch_engine.quant.quanto import QuantoWeight, unpack_without_compiler
from crosstune.torch_engine.quantized import StoredWeight

Tensors = Mapping[str, torch.Tensor]


def describe(weight: StoredWeight) -> dict[str, Any]:
    """Everything about a stored weight that is not in its tensors."""
    facts: dict[str, Any] = {"shape": list(weight.shape), "kind": type(weight).__name__}
    if isinstance(weight, FourBit):
        state = weight.state.as_dict(packed=False)
        return facts | {name: _plain(v) for name, v in state.items() if not isinstance(v, torch.Tensor)}
    if isinstance(weight, HqqWeight):
        return facts | {name: _plain(v) for name, v in weight.meta.items() if not isinstance(v, torch.Tensor)}
    if isinstance(weight, QuantoWeight):
        _, outer = weight.stored.__tensor_flatten__()
        return facts | {"outer": outer, "data": _packing(weight.stored._data)}
    assert isinstance(weight, EightBit), type(weight)
    return facts


def restore(facts: Mapping[str, Any], tensors: Tensors) -> StoredWeight:
    rows, columns = facts["shape"]
    return _RESTORE[facts["kind"]]((rows, columns), facts, tensors)


def _four_bit(shape: tuple[int, int], facts: Mapping[str, Any], tensors: Tensors) -> StoredWeight:
    from bitsandbytes.functional import QuantState

    parts = {name: tensor for name, tensor in tensors.items() if name != "packed"}
    packed = tensors["packed"]
    plain = {name: facts[name] for name in QuantState.valid_qs_keys if name in facts}
    return FourBit(
        shape=shape, packed=packed, state=QuantState.from_dict(plain | parts, device=packed.device)
    )


def _eight_bit(shape: tuple[int, int], facts: Mapping[str, Any], tensors: Tensors) -> StoredWeight:
    return EightBit(shape=shape, packed=tensors["packed"], scale=tensors["scale"])


def _hqq(shape: tuple[int, int], facts: Mapping[str, Any], tensors: Tensors) -> StoredWeight:
    meta = {name: _unplain(value) for name, value in facts.items() if name not in ("kind", "shape")}
    meta |= {"shape": torch.Size(shape), "scale": tensors["scale"], "zero": tensors["zero"]}
    return HqqWeight(shape=shape, packed=tensors["packed"], meta=meta)


def _quanto(shape: tuple[int, int], facts: Mapping[str, Any], tensors: Tensors) -> StoredWeight:
    from optimum.quanto.tensor.packed import PackedTensor
    from optimum.quanto.tensor.weights.qbits import WeightQBitsTensor
    from optimum.quanto.tensor.weights.qbytes import WeightQBytesTensor

    unpack_without_compiler()
    data, packing = tensors["data"], facts["data"]
    if packing is None:
        inner = {"_data": data, "_scale": tensors["scale"]}
        kind: Any = WeightQBytesTensor
    else:
        size, stride = ast.literal_eval(packing["size"]), ast.literal_eval(packing["stride"])
        whole = PackedTensor(data, int(packing["bits"]), torch.Size(size), tuple(stride))
        inner = {"_data": whole, "_scale": tensors["scale"], "_shift": tensors["shift"]}
        kind = WeightQBitsTensor
    return QuantoWeight(shape=shape, stored=kind.__tensor_unflatten__(inner, facts["outer"], None, None))


_RESTORE = {"FourBit": _four_bit, "EightBit": _eight_bit, "HqqWeight": _hqq, "QuantoWeight": _quanto}


def _packing(data: torch.Tensor) -> dict[str, str] | None:
    flatten = getattr(data, "__tensor_flatten__", None)
    if flatten is None:
        return None
    facts: dict[str, str] = flatten()[1]
    return facts


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return list(value) if isinstance(value, (tuple, torch.Size)) else value


def _unplain(value: Any) -> Any:
    return getattr(torch, value["dtype"]) if isinstance(value, dict) else value
