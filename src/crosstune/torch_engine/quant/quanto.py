"""optimum-quanto: integers of 8, 4 and 2 bits, and 8-bit floats, with scales per row or per group."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from crosstune.core.errors import UserError
from crosstune.core.quantization import QuantSpec

if TYPE_CHECKING:
    import torch

LIBRARY = "optimum.quanto"
BITS = (8, 4, 2)
EXTRA = "quanto"
PREFERENCE = 30
PREFERENCE_ON = {"mps": 15}  # it has Metal kernels
BITS_BY_ROW = (8,)
TAKES_KIND = True
DISTRIBUTION = "optimum-quanto"


def check(spec: QuantSpec, shape: tuple[int, int]) -> None:
    if spec.bits < 8 and shape[1] % spec.group_size:
        raise UserError(
            f"--group_size {spec.group_size} does not divide a layer with {shape[1]} inputs.",
            do="choose a --group_size that divides it, such as 64 or 32",
        )
    allowed = ("auto", "int", "float8") if spec.bits == 8 else ("auto", "int")
    if spec.kind not in allowed:
        raise UserError(
            f"quanto does not support --quant_type {spec.kind} with {spec.bits} bits.",
            do=f"use one of {', '.join(allowed)}",
        )


def quantize(
    weight: torch.Tensor, spec: QuantSpec, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    from optimum import quanto

    unpack_without_compiler()
    weight = weight.to(dtype).contiguous()
    kind = quanto.qfloat8 if spec.kind == "float8" else getattr(quanto, f"qint{spec.bits}")
    facts: dict[str, Any] = {"shape": list(weight.shape), "qtype": kind.name}
    if spec.bits == 8:
        scale = quanto.AbsmaxOptimizer()(weight, qtype=kind, axis=0)
        stored = quanto.quantize_weight(weight, qtype=kind, axis=0, scale=scale, optimized=False)
        return {"packed": _bits(stored._data), "scale": stored._scale}, facts
    scale, shift = quanto.MaxOptimizer()(weight, qtype=kind, axis=0, group_size=spec.group_size)
    stored = quanto.quantize_weight(
        weight, qtype=kind, axis=0, scale=scale, shift=shift, group_size=spec.group_size, optimized=False
    )
    packed = stored._data
    facts |= {"group_size": spec.group_size, "unpacked": list(packed.size())}
    return {"packed": packed._data, "scale": stored._scale, "shift": stored._shift}, facts


def dequantize(
    tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any], dtype: torch.dtype
) -> torch.Tensor:
    from optimum.quanto.tensor.packed import PackedTensor
    from optimum.quanto.tensor.qtype import qtypes
    from optimum.quanto.tensor.weights.qbits import WeightQBitsTensor
    from optimum.quanto.tensor.weights.qbytes import WeightQBytesTensor

    qtype, shape = qtypes[facts["qtype"]], tuple(facts["shape"])
    packed, scale = tensors["packed"], tensors["scale"]
    stored: Any
    if "unpacked" in facts:
        unpack_without_compiler()
        size = tuple(facts["unpacked"])
        data = PackedTensor(packed, qtype.bits, size, (size[1], 1))
        group_size, shift = facts["group_size"], tensors["shift"]
        stored = WeightQBitsTensor(qtype, 0, group_size, shape, (shape[1], 1), data, scale, shift)
    else:
        data = packed.view(qtype.dtype)
        stored = WeightQBytesTensor(qtype, 0, shape, (shape[1], 1), data, scale, None)
    dense: torch.Tensor = stored.dequantize()
    return dense.to(dtype)


def restore(
    tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read folders of older crosstune versions, where the packed bits are `data` and quanto's metadata is nested."""
    if "outer" not in facts:
        return dict(tensors), dict(facts)
    found = {"packed": _bits(tensors["data"])} | {n: t for n, t in tensors.items() if n != "data"}
    outer, packing = facts["outer"], facts["data"]
    read = {"shape": facts["shape"], "qtype": outer["qtype"]}
    if packing is not None:
        read |= {"group_size": int(outer["group_size"]), "unpacked": ast.literal_eval(packing["size"])}
    return found, read


def _bits(data: torch.Tensor) -> torch.Tensor:
    """View 8-bit floats as uint8: packed bits are always integers."""
    import torch

    return data.view(torch.uint8) if data.is_floating_point() else data


def unpack_without_compiler() -> None:
    """Make quanto unpack 2 and 4 bits with torch instead of compiling an extension on first use.

    Compiling takes up to two minutes, needs a compiler, and fails if distutils was imported before.
    """
    from optimum.quanto.library.extensions import get_extension, is_extension_available

    for name in ("quanto_cpp", "quanto_cuda", "quanto_hip", "quanto_mps"):
        if is_extension_available(name) and get_extension(name)._lib is None:
            get_extension(name)._lib = SimpleNamespace(unpack=_unpack)


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack several values per byte, lowest bits first; each bit position is one block of rows."""
    import torch

    return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])
