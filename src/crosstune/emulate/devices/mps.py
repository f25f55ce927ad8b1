"""List what torch supports on Apple GPUs, according to its sources."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend

KEY = "MPS"
"""The device's dispatch key in torch's operator table and dispatcher."""
BACKEND = "mps"
TITLE = "MPS"
MACHINE = "apple-m2-max-64gb"
"""The default profile, with macOS 14, which torch's wheels require."""

REFUSED = frozenset({torch.float64, torch.complex128})
"""ATen/mps/EmptyTensor.cpp rejects float64; getMPSDataType does not support complex128."""
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
"""torch.testing's all_mps_types, and two more that getMPSDataType supports."""
CONDITIONS = {torch.bfloat16: "bf16 needs macOS 14 or later"}

FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
"""If set, torch runs an operator without a kernel on the CPU."""
NEVER_FALL_BACK = ("c10d::",)
"""Collectives: ATen/mps/MPSFallback.mm rejects them on the CPU."""

ATTENTION = SDPBackend.MATH
"""On MPS, scaled_dot_product_attention has no fused kernel when gradients are required."""

PARTS = {
    "bnb": "bitsandbytes.backends.mps.ops",
    "quanto": "optimum.quanto.library.extensions.mps",
}
"""Quantizer -> the module that registers its library's kernels for the device; the library imports it only on a Mac."""


def is_present() -> bool:
    """True if this computer has the device; its kernels then reject CPU tensors."""
    return torch.backends.mps.is_available()


OWN_KERNEL = "is registered for MPS by its library; its torch operators were checked, any Metal code was not"
COMPOSITE = "is registered by its library for every device, not for MPS; its torch operators were checked"

NOT_CHECKED = (
    "memory: the plan's estimate is calculated, nothing was allocated on the device",
    "speed",
    "errors in Metal kernels, and which dtypes each of them supports",
    "code that libraries run only on a Mac, and which operators autocast runs in lower precision there",
    "which tensors stay on the host: all were assumed to be on the device",
)
