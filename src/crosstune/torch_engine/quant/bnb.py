"""bitsandbytes: 4-bit NormalFloat or float with doubly quantized scales, and 8-bit integers by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from crosstune.core.errors import UserError

if TYPE_CHECKING:  # so that the constants can be read without torch
    import torch

    from crosstune.torch_engine.quantized import QuantSpec

LIBRARY = "bitsandbytes"
BITS = (4, 8)
EXTRA = "bnb"
PREFERENCE = 10
BITS_BY_ROW = (8,)
BITS_WITH_DOUBLE_QUANT = (4,)
TAKES_KIND = True
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_INT8_LIMIT = 127.0
SLICE = 2**20
"""Weights quantized at a time on a CPU; a multiple of every block size."""


def check(spec: QuantSpec, shape: tuple[int, int]) -> None:
    if spec.bits == 4 and spec.group_size not in BLOCK_SIZES:
        raise UserError(
            f"bnb has no blocks of {spec.group_size} weights.",
            do=f"use --group_size {', '.join(map(str, BLOCK_SIZES))}",
        )
    allowed = ("auto", "nf4", "fp4") if spec.bits == 4 else ("auto", "int")
    if spec.kind not in allowed:
        raise UserError(
            f"bnb has no kind {spec.kind} with {spec.bits} bits.", do=f"use one of {', '.join(allowed)}"
        )


def quantize(weight: torch.Tensor, spec: QuantSpec, dtype: torch.dtype) -> FourBit | EightBit:
    import bitsandbytes.functional as bnb
    import torch

    if spec.bits == 8:
        packed, scale, _ = bnb.int8_vectorwise_quant(weight.to(torch.float16))
        return EightBit(shape=_shape(weight), packed=packed, scale=scale)
    kind = "nf4" if spec.kind == "auto" else spec.kind
    if weight.device.type != "cpu" or weight.numel() <= SLICE:
        packed, state = bnb.quantize_4bit(
            weight.contiguous(), blocksize=spec.group_size, compress_statistics=spec.double, quant_type=kind
        )
    else:
        packed, state = _quantize_in_slices(weight, spec, kind)
    return FourBit(shape=_shape(weight), packed=packed, state=state)


def _quantize_in_slices(weight: torch.Tensor, spec: QuantSpec, kind: str) -> tuple[torch.Tensor, Any]:
    """The same numbers in bounded memory: on a CPU the library compares every weight with all 16 codes at once."""
    import bitsandbytes.functional as bnb
    import torch

    parts = [
        bnb.quantize_4bit(part, blocksize=spec.group_size, compress_statistics=False, quant_type=kind)
        for part in weight.flatten().split(SLICE)
    ]
    packed = torch.cat([part for part, _ in parts])
    state = parts[0][1]
    state.shape = weight.shape
    state.absmax = torch.cat([each.absmax for _, each in parts])
    if spec.double:
        state.offset = state.absmax.mean()
        state.absmax, state.state2 = bnb.quantize_blockwise(state.absmax - state.offset, blocksize=256)
        state.nested = True
    return packed, state


@dataclass
class FourBit:
    shape: tuple[int, int]
    packed: torch.Tensor
    state: Any
    """bitsandbytes' own QuantState."""

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        import bitsandbytes.functional as bnb

        self.state.dtype = dtype
        return bnb.dequantize_4bit(self.packed, self.state)

    def tensors(self) -> dict[str, torch.Tensor]:
        import torch

        stored = self.state.as_dict(packed=False)
        parts = {name: value for name, value in stored.items() if isinstance(value, torch.Tensor)}
        return {"packed": self.packed, **parts}


@dataclass
class EightBit:
    shape: tuple[int, int]
    packed: torch.Tensor
    scale: torch.Tensor

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.packed.float() * (self.scale.float() / _INT8_LIMIT)[:, None]).to(dtype)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"packed": self.packed, "scale": self.scale}


def _shape(weight: torch.Tensor) -> tuple[int, int]:
    rows, columns = weight.shape
    return rows, columns
