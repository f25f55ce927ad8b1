"""Dequantize MXFP4 with Triton, for GPUs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_BYTES_WITH_SCALE = 16


def make_mxfp4_dense(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of packed bytes, two per byte, with a scale for each 16 bytes."""
    out = torch.empty(2 * packed.numel(), dtype=dtype, device=packed.device)
    _mxfp4_bytes[(triton.cdiv(packed.numel(), _BLOCK),)](
        packed.contiguous(),
        scales.contiguous(),
        out,
        packed.numel(),
        BLOCK=_BLOCK,
        BYTES_WITH_SCALE=_BYTES_WITH_SCALE,
    )
    return out


@triton.jit
def _mxfp4_bytes(packed, scales, out, num_bytes, BLOCK: tl.constexpr, BYTES_WITH_SCALE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    byte = first + tl.arange(0, BLOCK)
    inside = byte < num_bytes
    bits = tl.load(packed + byte, mask=inside, other=0).to(tl.int32)
    exponent = tl.load(scales + byte // BYTES_WITH_SCALE, mask=inside, other=0).to(tl.int32)
    # The bits of a float with this exponent; 2^-127 is a denormal.
    scale = tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.float32, bitcast=True)
    values = tl.interleave(_e2m1(bits & 15) * scale, _e2m1(bits >> 4) * scale)
    place = 2 * first + tl.arange(0, 2 * BLOCK)
    tl.store(out + place, values.to(out.dtype.element_ty), mask=place < 2 * num_bytes)


@triton.jit
def _e2m1(code):
    """Return the value of a code: a sign, two bits of exponent, one bit of mantissa."""
    magnitude = code & 7
    shift = tl.where(magnitude < 2, 1, magnitude >> 1) - 1
    halves = tl.where(magnitude < 2, magnitude, (2 + (magnitude & 1)) << shift)
    return tl.where((code & 8) != 0, -0.5, 0.5) * halves.to(tl.float32)
