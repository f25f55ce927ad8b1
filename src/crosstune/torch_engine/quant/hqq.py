"""HQQ: integers of 8 to 1 bits with a scale and a zero point per group, fitted to the weights without data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crosstune.core.errors import UserError

if TYPE_CHECKING:  # so that the constants can be read without torch
    import torch

    from crosstune.torch_engine.quantized import QuantSpec

LIBRARY = "hqq.core.quantize"
BITS = (8, 4, 3, 2, 1)
EXTRA = "hqq"
PREFERENCE = 20
PIECE = 2**21
"""Numbers of a weight that are fitted at once."""


def check(spec: QuantSpec, shape: tuple[int, int]) -> None:
    if (shape[0] * shape[1]) % spec.group_size:
        raise UserError(
            f"Groups of {spec.group_size} weights do not divide a layer of {shape[0]} x {shape[1]}.",
            do="choose a --group_size that divides it, such as 64 or 32",
        )
    if spec.kind not in ("auto", "int"):
        raise UserError(f"hqq has no kind {spec.kind}.", do="leave --quant_type out")


def quantize(weight: torch.Tensor, spec: QuantSpec, dtype: torch.dtype) -> HqqWeight:
    """A large weight goes a few rows at a time: fitting holds about ten copies of what it fits in fp32."""
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
    meta |= {"shape": weight.shape, "packing": packing, "scale": torch.cat(scales), "zero": torch.cat(zeros)}
    return HqqWeight(shape=(rows, columns), packed=Quantizer.pack[packing](torch.cat(codes)), meta=meta)


def _rows_at_once(rows: int, columns: int, group_size: int) -> int:
    """As many rows as PIECE numbers make, in whole groups."""
    whole = group_size // math.gcd(columns, group_size)
    return min(rows, max(whole, PIECE // columns // whole * whole))


@dataclass
class HqqWeight:
    shape: tuple[int, int]
    packed: torch.Tensor
    meta: dict[str, Any]
    """HQQ's own description: bits, groups, packing, scales and zero points."""

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        from hqq.core.quantize import Quantizer

        return Quantizer.dequantize(self.packed, self.meta).reshape(self.shape).to(dtype)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"packed": self.packed, "scale": self.meta["scale"], "zero": self.meta["zero"]}
