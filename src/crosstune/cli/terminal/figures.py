"""Format sizes, counts, durations and measured numbers. Without rich, which takes long to import."""

from __future__ import annotations

import math


def size(num_bytes: float) -> str:
    """Format bytes as 1.5 GiB."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Format seconds as 42s, 3m05s or 2h10m."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds}s"
    minutes, rest = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def count(number: float) -> str:
    """Format a number as 1.2k, 3.4M or 5.6B."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.1f}{unit}"
    return f"{number:.0f}"


def figure(value: float, *, digits: int = 3) -> str:
    """Format a measured number with `digits` significant digits: 0.0123, 1.50, 12,300."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -4:
        return f"{value:.{digits - 1}e}"
    rounded = round(value, digits - 1 - exponent)
    return f"{rounded:,.{max(0, digits - 1 - exponent)}f}"


def ratio(value: float) -> str:
    """Format a ratio of speeds: 2.8 times the speed, the speed, 1/125 of the speed."""
    if value <= 0:
        return "an unmeasurable fraction"
    if 0.95 <= value <= 1.05:
        return "the speed"
    if value > 1:
        return f"{figure(value, digits=2)} times the speed"
    return f"1/{figure(1 / value, digits=2)} of the speed"
