"""HQQ: integers of 8 to 1 bits with a scale and zero point per group, fitted without calibration data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from crosstune.core.errors import UserError
from crosstune.core.quantization import QuantSpec

if TYPE_CHECKING:
    import torch

LIBRARY = "hqq.core.quantize"
BITS = (8, 4, 3, 2, 1)
EXTRA = "hqq"
PREFERENCE = 20
PIECE = 2**21
"""Weights fitted at once."""
SCALES_IN_A_GROUP = 128
"""Group size for quantizing the scales themselves."""
_PARTS = ("packed", "scale", "zero")


def check(spec: QuantSpec, shape: tuple[int, int]) -> None:
    if (shape[0] * shape[1]) % spec.group_size:
        raise UserError(
            f"--group_size {spec.group_size} does not divide a layer of {shape[0]} x {shape[1]}.",
            do="choose a --group_size that divides it, such as 64 or 32",
        )


def quantize(
    weight: torch.Tensor, spec: QuantSpec, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Quantize a few rows at a time: fitting needs about ten fp32 copies of its input."""
    import torch
    from hqq.core.quantize import Quantizer

    rows, columns = weight.shape
    codes, scales, zeros, meta = [], [], [], dict[str, Any]()
    for piece in weight.split(_rows_at_once(rows, columns, spec.group_size)):
        found, meta = Quantizer.quantize(
            piece.float(),
            nbits=spec.bits,
            group_size=spec.group_size,
            axis=1,
            bitpack=False,
            compute_dtype=dtype,
            device=str(weight.device),
        )
        codes.append(found.to(torch.uint8))
        scales.append(meta["scale"].to(dtype))
        zeros.append(meta["zero"].to(dtype))
    packing = Quantizer.bit_to_packing[spec.bits]
    tensors = {
        "packed": Quantizer.pack[packing](torch.cat(codes)),
        "scale": torch.cat(scales),
        "zero": torch.cat(zeros),
    }
    return tensors, _facts(meta | {"shape": weight.shape, "packing": packing})


def _rows_at_once(rows: int, columns: int, group_size: int) -> int:
    """Return a number of rows with about PIECE weights in whole groups."""
    whole = group_size // math.gcd(columns, group_size)
    return min(rows, max(whole, PIECE // columns // whole * whole))


def shrink(
    tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any], names: Sequence[str]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Quantize zero points or scales to 8 bits with HQQ itself."""
    import torch
    from hqq.core.quantize import Quantizer

    # Zero points share a small range over the whole matrix; scales vary more, so they are grouped.
    how: dict[str, dict[str, Any]] = {
        "zero": {"channel_wise": False, "group_size": None},
        "scale": {"channel_wise": True, "group_size": SCALES_IN_A_GROUP, "axis": 1},
    }
    found, small = dict(tensors), dict[str, Any]()
    for name in names:
        dense = found.pop(name)
        packed, meta = Quantizer.quantize(dense, nbits=8, device=str(dense.device), **how[name])
        parts = {"packed": packed, "scale": meta["scale"], "zero": meta["zero"]}
        found |= {f"{name}_{part}": tensor for part, tensor in parts.items()}
        small[name] = _facts(meta | {"shape": dense.shape, "compute_dtype": torch.float32})
    return found, {**facts, "small": small}


def dequantize(
    tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any], dtype: torch.dtype
) -> torch.Tensor:
    import torch

    small = {
        name: _dense({part: tensors[f"{name}_{part}"] for part in _PARTS}, inner).to(torch.float32)
        for name, inner in facts.get("small", {}).items()
    }
    return _dense({**tensors, **small}, facts).to(dtype)


def _dense(parts: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> torch.Tensor:
    import torch
    from hqq.core.quantize import Quantizer

    meta = {
        name: getattr(torch, value["dtype"]) if name.endswith("dtype") else value
        for name, value in facts.items()
    }
    meta |= {"scale": parts["scale"], "zero": parts["zero"]}
    dense: torch.Tensor = Quantizer.dequantize(parts["packed"], meta)
    return dense.reshape(facts["shape"])


def restore(
    tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return dict(tensors), {name: value for name, value in facts.items() if name != "kind"}


def _facts(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return HQQ's metadata (bits, groups, packing) as JSON."""
    import torch

    plain: dict[str, Any] = {}
    for name, value in meta.items():
        if isinstance(value, torch.dtype):
            plain[name] = {"dtype": str(value).removeprefix("torch.")}
        elif not isinstance(value, torch.Tensor):
            plain[name] = list(value) if isinstance(value, (tuple, torch.Size)) else value
    return plain
