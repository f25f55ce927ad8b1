"""Parse durations such as 90, 45s, 30m, 3h30m and 1d."""

from __future__ import annotations

import re

from crosstune.core.errors import UserError

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_PART = re.compile(r"(\d+(?:\.\d+)?)([dhms])")


def parse_duration(text: str) -> float:
    """Return the seconds; a number without a unit is seconds."""
    compact = text.strip().lower()
    if re.fullmatch(r"\d+(?:\.\d+)?", compact):
        seconds = float(compact)
    else:
        parts = _PART.findall(compact)
        if not parts or "".join(number + unit for number, unit in parts) != compact:
            raise _bad(text)
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if seconds <= 0:
        raise _bad(text)
    return seconds


def _bad(text: str) -> UserError:
    return UserError(f"'{text}' is not a duration.", do="write it like 90s, 30m, 3h30m or 1d")
