"""Compute errors and correlations between two series of scores. An undefined correlation is NaN."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
_FEW = 128
"""Up to this many values, all pairs are compared at once."""


def mean_absolute_error(expected: ArrayLike, found: ArrayLike) -> float:
    difference = np.abs(_array(found) - _array(expected))
    return float(difference.mean()) if len(difference) else math.nan


def root_mean_squared_error(expected: ArrayLike, found: ArrayLike) -> float:
    difference = _array(found) - _array(expected)
    return float(np.sqrt((difference**2).mean())) if len(difference) else math.nan


def are_within(expected: ArrayLike, found: ArrayLike, *, distance: float) -> NDArray[np.bool_]:
    """Return which scores are at most `distance` away; a NaN is not."""
    difference = np.abs(_array(found) - _array(expected))
    # Scores are sums of decimal fractions: 8.7 - 7.7 is a little more than 1.
    near: NDArray[np.bool_] = difference <= distance * (1 + 1e-9)
    return near


def share_within(expected: ArrayLike, found: ArrayLike, *, distance: float) -> float:
    """Return the share of scores at most `distance` away."""
    near = are_within(expected, found, distance=distance)
    return float(near.mean()) if len(near) else math.nan


def pearson(expected: ArrayLike, found: ArrayLike) -> float:
    """Return Pearson's r; NaN where a series is constant or has fewer than two values."""
    first, second = _array(expected), _array(found)
    if len(first) < 2 or is_constant(first) or is_constant(second):
        return math.nan
    first, second = _unit(first - first.mean()), _unit(second - second.mean())
    return float(np.clip((first * second).sum(), -1.0, 1.0))


def spearman(expected: ArrayLike, found: ArrayLike) -> float:
    """Return Spearman's rho: Pearson's r of the ranks, where ties share their mean rank."""
    return pearson(mean_ranks(_array(expected)), mean_ranks(_array(found)))


def kendall(expected: ArrayLike, found: ArrayLike) -> float:
    """Return Kendall's tau-b, which counts ties, in O(n log n) by merge sort (Knight's method)."""
    first, second = _array(expected), _array(found)
    count = len(first)
    if count < 2 or is_constant(first) or is_constant(second):
        return math.nan
    order = np.lexsort((second, first))
    first, second = first[order], second[order]
    discordant = _count_inversions(second)
    both = _tied_pairs(np.unique(np.stack([first, second], axis=1), axis=0, return_counts=True)[1])
    ties_first = _tied_pairs(np.unique(first, return_counts=True)[1])
    ties_second = _tied_pairs(np.unique(second, return_counts=True)[1])
    total = count * (count - 1) // 2
    balance = total - ties_first - ties_second + both - 2 * discordant
    scale = math.sqrt(total - ties_first) * math.sqrt(total - ties_second)
    return max(-1.0, min(1.0, balance / scale))


def mean_ranks(values: Floats) -> Floats:
    """Return the ranks from 1; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Floats = ((last - counts + 1 + last) / 2.0)[inverse]
    return ranks


def is_constant(values: Floats) -> bool:
    """Return whether all values are the same, up to rounding."""
    spread = float(values.max() - values.min())
    return not spread > 1e-13 * max(abs(float(values.max())), abs(float(values.min())))


def _array(values: ArrayLike) -> Floats:
    return np.asarray(values, dtype=np.float64)


def _unit(values: Floats) -> Floats:
    largest = np.abs(values).max()
    scaled = values / largest  # so that squares neither overflow nor vanish
    return scaled / np.sqrt((scaled**2).sum())


def _tied_pairs(counts: NDArray[np.int64]) -> int:
    return int((counts * (counts - 1) // 2).sum())


def _count_inversions(values: Floats) -> int:
    """Return the number of pairs in the wrong order, merging halves whose inversions are counted by binary search."""
    if len(values) <= _FEW:
        return int(np.triu(values[:, None] > values[None, :]).sum())
    middle = len(values) // 2
    left, right = values[:middle], values[middle:]
    within = _count_inversions(left) + _count_inversions(right)
    left = np.sort(left)
    return within + int((len(left) - np.searchsorted(left, right, side="right")).sum())
