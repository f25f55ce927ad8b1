"""Format sizes, counts and durations for people."""

from __future__ import annotations


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
