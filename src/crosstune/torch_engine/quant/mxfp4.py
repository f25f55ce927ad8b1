"""MXFP4: 4-bit floats (e2m1) with a power of two per 32 values, the format of gpt-oss' experts, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from crosstune.core.errors import UserError
from crosstune.core.quantization import QuantSpec

if TYPE_CHECKING:
    import torch

LIBRARY = "torch"
BITS = (4,)
EXTRA = "torch"
PREFERENCE = 95
GROUP_SIZES = (32,)
GROUP = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of e2m1; bit 3 of a code is the sign."""
LARGEST_EXPONENT = 2
"""Of e2m1: 6 is 1.5 x 2^2."""
BIAS = 127
"""Of the stored exponents (e8m0)."""


def check(spec: QuantSpec, shape: tuple[int, int]) -> None:
    if spec.group_size != GROUP:
        raise UserError(f"mxfp4 has one scale per {GROUP} values.", do=f"use --group_size {GROUP}")
    if shape[1] % GROUP:
        raise UserError(
            f"mxfp4 does not support a layer with {shape[1]} inputs.",
            why=f"it has one scale per {GROUP} values.",
            do="use --quantization_backend bnb",
        )


def quantize(
    weight: torch.Tensor, spec: QuantSpec, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Round to the nearest value, ties to the even code; the scale is as in the OCP specification."""
    import torch

    groups = weight.float().reshape(weight.shape[0], -1, GROUP)
    largest = groups.abs().amax(dim=-1)
    exponent = torch.where(largest > 0, torch.frexp(largest).exponent - 1 - LARGEST_EXPONENT, 0)
    exponent = exponent.clamp(-BIAS, BIAS)
    scaled = torch.ldexp(groups, -exponent[..., None])
    values = torch.tensor(VALUES, device=weight.device)
    middles = (values[1:] + values[:-1]) / 2
    magnitude = scaled.abs().contiguous()
    up, down = (torch.bucketize(magnitude, middles, right=right) for right in (True, False))
    codes = torch.where(up % 2 == 0, up, down) + 8 * (scaled < 0)
    codes = codes.to(torch.uint8)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return {"packed": packed, "scales": (exponent + BIAS).to(torch.uint8)}, {"shape": list(weight.shape)}


def dequantize(
    tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any], dtype: torch.dtype
) -> torch.Tensor:
    import torch

    packed, scales = tensors["packed"], tensors["scales"]
    table = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=dtype, device=packed.device)
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)
    return torch.ldexp(table[codes.int()], scales[..., None].int() - BIAS).to(dtype).reshape(facts["shape"])


def dequantize_stack(
    tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any], dtype: torch.dtype
) -> torch.Tensor:
    """Dequantize matrices that are stacked along the first dimension, with the same bits as one by one."""
    import torch

    from crosstune.torch_engine.kernels.operations import has_triton

    packed, scales = tensors["packed"], tensors["scales"]
    if packed.device.type == "cuda" and has_triton():
        from crosstune.torch_engine.kernels.triton_mxfp4 import make_mxfp4_dense

        return make_mxfp4_dense(packed, scales, dtype).view(len(packed), *facts["shape"])
    pairs = zip(packed, scales, strict=True)
    return torch.stack([dequantize({"packed": p, "scales": s}, facts, dtype) for p, s in pairs])
