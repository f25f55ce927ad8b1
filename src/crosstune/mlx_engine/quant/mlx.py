"""Bits and group sizes of MLX's quantization. Does not import MLX, so that a request can be checked without it."""

from __future__ import annotations

from crosstune.core.errors import UserError

LIBRARY = "mlx.core"
BITS = (2, 3, 4, 5, 6, 8)
EXTRA = "mlx"
PREFERENCE = 40
GROUP_SIZES = (32, 64, 128)


def check_form(*, bits: int, group_size: int) -> None:
    """Raise unless MLX supports these bits and this group size."""
    if bits not in BITS:
        raise UserError(
            f"MLX does not support {bits}-bit weights.", do=f"use --n_bits {', '.join(map(str, BITS))}"
        )
    if group_size not in GROUP_SIZES:
        raise UserError(
            f"MLX does not support group size {group_size}.",
            do=f"use --group_size {', '.join(map(str, GROUP_SIZES))}",
        )
