"""Choose the implementation of attention from the kernels that work on a backend."""

from __future__ import annotations

from typing import Literal

from crosstune.core.machine import BackendReport

FLASH_PACKAGE = "flash_attn"
"""The package, and the kernel of a BackendReport that stands for it."""

_FUSED = frozenset({"efficient", "cudnn"})
"""Kernels of torch besides flash that hold no scores."""

Attention = Literal["flash_attn", "sdpa", "eager", "mlx"]


def choose_attention(
    report: BackendReport, *, flash: bool | None, precision: str, packing: bool
) -> tuple[Attention, str]:
    """Return the implementation of attention, and why; `flash` is --use_flash_attention.

    The package flash_attn computes in 16 bits only, and in packed rows it would attend across documents as soon as a
    batch has several rows. torch's own attention picks the best of its kernels, flash among them, at each call.
    """
    if report.engine == "mlx":
        return "mlx", "MLX's own fused attention"
    if flash is False:
        return "eager", "flash attention is turned off"
    kernels = ", ".join(kernel for kernel in report.attention if kernel != FLASH_PACKAGE)
    own = f"torch's own, with the kernels that ran here: {kernels or 'none'}"
    if FLASH_PACKAGE not in report.attention:
        return "sdpa", own
    if precision == "fp32":
        return "sdpa", f"{own}; {FLASH_PACKAGE} has no fp32"
    if packing:
        return "sdpa", f"{own}; {FLASH_PACKAGE} does not separate the documents of packed rows"
    return "flash_attn", f"the package {FLASH_PACKAGE}, where the model supports it"


def held_score_bits(
    report: BackendReport, *, flash: bool | None, compute_bits: int, shares_keys: bool = False
) -> int:
    """Return the bits of each attention score that training holds in memory; 0 for a kernel that never holds them.

    `flash` is --use_flash_attention; `shares_keys` tells whether several heads share their keys, in rows without a mask.
    Without a fused kernel, torch computes scores in fp32 whatever the precision. On CUDA the kernels that take shared keys
    compute in 16 bits. MLX has no fused attention for training on Metal; its scores are in the precision of the model.
    """
    if report.engine == "mlx":
        return compute_bits
    is_fused = report.has_flash_attention or not _FUSED.isdisjoint(report.attention)
    if report.device == "cuda" and shares_keys and compute_bits == 32:
        is_fused = False
    return 0 if is_fused and flash is not False else 32
