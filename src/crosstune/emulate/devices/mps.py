"""The Apple GPU as torch's own sources describe it, for a check on a computer that has none."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend

KEY = "MPS"
"""torch's word for the device in its table of operators and in its dispatcher."""
BACKEND = "mps"
TITLE = "MPS"
MACHINE = "apple-m2-max-64gb"
"""The bundled profile that stands in when no machine is named: one with macOS 14, which torch's wheels ask for."""

REFUSED = frozenset({torch.float64, torch.complex128})
"""ATen/mps/EmptyTensor.cpp allocates no float64; getMPSDataType knows no complex128."""
TESTED = frozenset(
    {
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
"""torch.testing's all_mps_types, with the two that getMPSDataType has besides."""
CONDITIONS = {torch.bfloat16: "bf16 needs macOS 14 or later"}

FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
"""With it, torch copies the inputs of an operator that has no kernel to the CPU, runs it there and copies back."""
NEVER_FALL_BACK = ("c10d::",)
"""Collectives: ATen/mps/MPSFallback.mm refuses to run them elsewhere."""

ATTENTION = SDPBackend.MATH
"""scaled_dot_product_attention takes no fused kernel there while gradients are wanted."""

PARTS = {
    "bnb": "bitsandbytes.backends.mps.ops",
    "quanto": "optimum.quanto.library.extensions.mps",
}
"""Quantizer -> the module in which its library registers kernels for the device, and which it imports on a Mac only."""


def is_here() -> bool:
    """Whether there is such a device after all: its own kernels must then not be given tensors of the CPU."""
    return torch.backends.mps.is_available()


OWN_KERNEL = "is registered for MPS by its library; its torch operators were checked, Metal code that it may use was not"
COMPOSITE = "is not registered for MPS by its library, but for every device; its torch operators were checked"

NOT_CHECKED = (
    "memory: the plan's estimate is arithmetic, and no allocator was asked",
    "speed",
    "errors of Metal kernels themselves, and which dtypes each of them takes",
    "branches that libraries take on a Mac only, and the operators that autocast shortens there",
    "which tensors stay on the host: everything was taken to be on the device",
)
