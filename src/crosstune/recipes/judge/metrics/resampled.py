"""Compute metrics for many draws of the bootstrap at once, from how often each draw has each item.

The result for a draw is that of the plain function over its items, as often as they were drawn; NaN where that is undefined.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from crosstune.recipes.judge.metrics.agreement import Counts

Floats = NDArray[np.float64]
_BLOCK = 2048
"""Items whose pairs with all others are compared at a time."""
_CONSTANT = 1e-13
"""Variance, as a fraction of the largest one possible, below which a series is constant up to rounding."""


def mean(weights: Floats, values: Floats) -> Floats:
    found: Floats = (weights @ values) / weights.sum(axis=1)
    return found


def pearson(weights: Floats, first: Floats, second: Floats) -> Floats:
    return _correlate(weights, _scaled(first)[None], _scaled(second)[None])


def spearman(weights: Floats, first: Floats, second: Floats) -> Floats:
    return _correlate(weights, _ranks(weights, first), _ranks(weights, second))


def kendall(weights: Floats, first: Floats, second: Floats) -> Floats:
    """Return tau-b from the signs of all pairs of items, in blocks of items."""
    balance = np.zeros(len(weights))
    for start in range(0, len(first), _BLOCK):
        block = slice(start, start + _BLOCK)
        signs = np.sign(first[block, None] - first[None]) * np.sign(second[block, None] - second[None])
        balance += ((weights @ signs.T) * weights[:, block]).sum(axis=1) / 2
    size = weights.sum(axis=1)
    total = size * (size - 1) / 2
    free = [total - (each * (each - 1) / 2).sum(axis=1) for each in _counts_of_values(weights, first, second)]
    return _divide(balance, np.sqrt(free[0]) * np.sqrt(free[1]))


def of_counts(
    weights: Floats,
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    metric: Callable[[Counts], float],
    *,
    num_classes: int,
) -> Floats:
    """Return a metric of the confusion of classes in each draw."""
    cells = np.eye(num_classes**2)[rows * num_classes + columns]
    tables = np.rint(weights @ cells).astype(np.int64).reshape(-1, num_classes, num_classes)
    return np.array([metric(table) for table in tables])


def _scaled(values: Floats) -> Floats:
    """Return values around zero, of at most one, so that squares neither overflow nor vanish."""
    centred = values - values.mean()
    largest = np.abs(centred).max(initial=0.0)
    scaled: Floats = centred / largest if largest > 0 else centred
    return scaled


def _ranks(weights: Floats, values: Floats) -> Floats:
    """Return the mean rank of each item in each draw, as a fraction of the draw."""
    [counts] = _counts_of_values(weights, values)
    places = np.unique(values, return_inverse=True)[1]
    middle = (np.cumsum(counts, axis=1) - counts / 2) / weights.sum(axis=1, keepdims=True)
    ranks: Floats = middle[:, places] - 0.5
    return ranks


def _counts_of_values(weights: Floats, *series: Floats) -> list[Floats]:
    """Return how often each distinct value is drawn, for each series."""
    found = []
    for values in series:
        distinct, places = np.unique(values, return_inverse=True)
        sums = np.zeros((len(weights), len(distinct)))
        order = np.argsort(places, kind="stable")
        starts = np.searchsorted(places[order], np.arange(len(distinct)))
        np.add.reduceat(weights[:, order], starts, axis=1, out=sums)
        found.append(sums)
    return found


def _correlate(weights: Floats, first: Floats, second: Floats) -> Floats:
    """Return the correlation of two series in each draw; they are the same for all draws, or have a row for each."""
    size = weights.sum(axis=1)

    def average(values: Floats) -> Floats:
        found: Floats = (weights * values).sum(axis=1) / size
        return found

    mean_first, mean_second = average(first), average(second)
    together = average(first * second) - mean_first * mean_second
    spreads = [average(each**2) - middle**2 for each, middle in ((first, mean_first), (second, mean_second))]
    spreads = [np.where(each > _CONSTANT, each, 0.0) for each in spreads]
    return np.clip(_divide(together, np.sqrt(spreads[0] * spreads[1])), -1.0, 1.0)


def _divide(above: Floats, below: Floats) -> Floats:
    found: Floats = np.divide(above, below, out=np.full(len(above), np.nan), where=below > 0)
    return found
