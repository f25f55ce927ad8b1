"""Confidence intervals of fractions and of their differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

Interval = tuple[float, float]
Z95 = 1.959964
"""The normal quantile of a 95 % interval."""


def wilson(fraction: float, count: int) -> Interval:
    """Return the 95 % interval (Wilson) of a fraction of `count` examples. Its width is not 0 for fractions of 0 and 1."""
    square = Z95**2 / count
    middle = (fraction + square / 2) / (1 + square)
    half = math.sqrt(fraction * (1 - fraction) * square + square**2 / 4) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return the 95 % interval of a mean: Wilson's if every value is 0 or 1. None for fewer than two values, or if all are
    equal."""
    if len(values) < 2:
        return None
    mean = statistics.fmean(values)
    if set(values) <= {0.0, 1.0}:
        return wilson(mean, len(values))
    half = Z95 * statistics.stdev(values) / math.sqrt(len(values))
    return (mean - half, mean + half) if half else None


def differ(first: float, second: float, *, intervals: Sequence[Interval]) -> bool:
    """Return True if the 95 % interval of the difference (Newcombe), from the intervals of both values, does not contain 0."""
    (low, (_, above)), (high, (below, _)) = sorted(zip((first, second), intervals, strict=True))
    return high - low > math.hypot(above - low, high - below)
