"""Parse durations such as 90s, 3h30m and 1d."""

from __future__ import annotations

import re

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_PART = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)([dhms])")
_LONGEST_S = 10 * 366 * 86400


def parse_duration(text: str) -> float:
    """Return the seconds; a number without a unit is seconds. A ValueError says what a duration looks like."""
    compact = text.strip().lower()
    if not any(unit in compact for unit in _SECONDS):
        compact += "s"
    parts = _PART.findall(compact)
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    is_whole = "".join(number + unit for number, unit in parts) == compact
    if not is_whole or not 0 < seconds <= _LONGEST_S:
        raise ValueError("a duration such as 90s, 30m, 3h30m or 1d, of at most ten years")
    return seconds
