"""HQQ: integers of 8 to 1 bits with a scale and a zero point per group, fitted to the weights without data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from crosstune.core.errors import UserError
from crosstune.torch_engine.quantized import QuantSpec

LIBRARY = "hqq.core.quantize"
BITS = (8, 4, 3, 2, 1)


def check(spec: QuantSpec, shape: tuple[int, int]) -> None:
    if (shape[0] * shape[1]) % spec.group_size:
        raise UserError(
            f"Groups of {spec.group_size} weights do not divide a layer of {shape[0]} x {shape[1]}.",
            do="choose a --group_size that divides it, such as 64 or 32",
        )
    if spec.kind not in ("auto", "int"):
        raise UserError(f"hqq has no kind {spec.kind}.", do="leave --quant_type out")


def quantize(weight: torch.Tensor, spec: QuantSpec, dtype: torch.dtype) -> HqqWeight:
    from hqq.core.quantize import Quantizer

    packed, meta = Quantizer.quantize(
        weight.float(),
        nbits=spec.bits,
        group_size=spec.group_size,
        axis=1,
        compute_dtype=dtype,
        device=str(weight.device),
    )
    meta["scale"], meta["zero"] = meta["scale"].to(dtype), meta["zero"].to(dtype)
    rows, columns = weight.shape
    return HqqWeight(shape=(rows, columns), packed=packed, meta=meta)


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
