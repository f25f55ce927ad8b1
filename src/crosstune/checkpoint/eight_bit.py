"""Convert bitsandbytes' 8-bit optimizer state to fp32, for engines that do not have it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from crosstune.core.protocols import Array

Moments = Mapping[str, Mapping[str, Array]]

_PARTS = {"first_moment": "1", "second_moment": "2"}


def holds_eight_bit(moments: Moments) -> bool:
    return "state1" in moments


def plain_moments(moments: Moments, weights: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    """Return the moments in fp32. Each byte is an index into a table of values, scaled by the maximum of its block."""
    plain: dict[str, dict[str, Array]] = {slot: {} for slot in (*_PARTS, "step")}
    for name, weight in weights.items():
        if name not in moments["state1"]:
            continue
        plain["step"][name] = np.asarray(moments["step"][name], dtype=np.float32)
        for slot, number in _PARTS.items():
            codes = moments[f"state{number}"][name]
            if codes.dtype == np.uint8:
                table, largest = moments[f"qmap{number}"][name], moments[f"absmax{number}"][name]
                codes = _values(codes, table, largest)
            plain[slot][name] = codes.astype(np.float32).reshape(weight.shape)
    return plain


def _values(codes: Array, table: Array, largest: Array) -> Array:
    flat = table[codes.reshape(-1)]
    block = -(-flat.size // largest.size)
    block = 1 << (block - 1).bit_length()  # block sizes are powers of two; the last block may be shorter
    values: Array = flat * np.repeat(largest, block)[: flat.size]
    return values
