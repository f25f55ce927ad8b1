"""Compute a judge's metrics: correlation, agreement, calibration, ROUGE-L and bootstrap intervals.

A metric over items gets a row of `weights` per bootstrap draw, the count of each item in the draw. It returns one value
per draw, NaN where it is undefined. `all_once` counts every item once. A metric of labels (accuracy, kappa) gets a
confusion matrix and returns one number; `of_counts` applies it to each draw.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
"""A confusion matrix: rows expected, columns found."""
NUM_DRAWS = 1000
NUM_BINS = 10
_DRAWS_AT_ONCE = 50
"""Bounds the memory of the intervals: a metric needs several arrays of draws x items."""
_ROUNDING = 1e-13
"""Relative spread below which a series is constant."""
_TEMPERATURES = np.exp(np.linspace(math.log(0.05), math.log(20.0), 241))
_WORD = re.compile(r"\w+")


def all_once(count: int) -> Floats:
    return np.ones((1, count))


def draw_weights(
    count: int, *, groups: Sequence[str] | None = None, num_draws: int = NUM_DRAWS, seed: int = 0
) -> Floats:
    """Draw items with replacement; return the count of each item, one row per draw.

    With several groups, draw whole groups: items of one source are not independent.
    """
    numbers: dict[str, int] = {}
    places = [numbers.setdefault(group, len(numbers)) for group in groups or ()]
    place = np.array(places) if len(numbers) > 1 else np.arange(count)
    num_groups = int(place.max(initial=-1)) + 1
    draw = np.random.Generator(np.random.Philox(key=(seed, count)))
    weights = np.zeros((num_draws, num_groups))
    for row in weights:
        row += np.bincount(draw.integers(0, num_groups, size=num_groups), minlength=num_groups)
    return weights[:, place]


def interval(
    metric: Callable[[Floats], Floats], weights: Floats, *, level: float = 0.95
) -> list[float] | None:
    """Return the percentile interval of a metric; None if it is undefined in more than half of the draws."""
    parts = range(0, len(weights), _DRAWS_AT_ONCE)
    values = np.concatenate([metric(weights[start : start + _DRAWS_AT_ONCE]) for start in parts])
    finite = values[np.isfinite(values)]
    if not len(finite) or len(finite) * 2 < len(values):
        return None
    return [float(bound) for bound in np.quantile(finite, [(1 - level) / 2, (1 + level) / 2])]


def mean(weights: Floats, values: Floats) -> Floats:
    found: Floats = (weights @ values) / weights.sum(axis=1)
    return found


def pearson(weights: Floats, first: Floats, second: Floats) -> Floats:
    """Return Pearson's r."""
    return _correlate(weights, _centred(first)[None], _centred(second)[None])


def spearman(weights: Floats, first: Floats, second: Floats) -> Floats:
    """Return Spearman's rho: Pearson's r of the ranks, where ties share their mean rank."""
    return _correlate(weights, _ranks(weights, first), _ranks(weights, second))


def kendall(weights: Floats, first: Floats, second: Floats) -> Floats:
    """Return Kendall's tau-b, in O(n log n) per draw."""
    first, second = _without_rounding(first), _without_rounding(second)
    size = weights.sum(axis=1)
    every, tied_first, tied_second, tied_both = (
        (counts * (counts - 1) / 2).sum(axis=1)
        for counts in (
            size[:, None],
            _counts_of_values(weights, first),
            _counts_of_values(weights, second),
            _counts_of_values(weights, np.stack([first, second], axis=1)),
        )
    )
    order = np.lexsort((second, first))
    # Pairs that tie in `first` are in ascending order of `second`, so `_count_ascending` counts them too.
    balance = _count_ascending(weights.T[order], second[order]) - (tied_first - tied_both)
    return _divide(balance, np.sqrt(every - tied_first) * np.sqrt(every - tied_second))


def _count_ascending(weights: Floats, values: Floats) -> Floats:
    """Return the number of ascending pairs minus the number of descending pairs; `weights` has a column per draw.

    As in merge sort, each half of a span is compared with the other half, for spans of 2, 4, 8 ... items.
    """
    ranks = np.unique(values, return_inverse=True)[1]
    place, num_ranks = np.arange(len(values)), len(values) + 1
    total = np.zeros(weights.shape[1])
    width = 1
    while width < len(values):
        keys = place // (2 * width) * num_ranks + ranks
        right = place // width % 2 == 1
        order = np.flatnonzero(~right)
        order = order[np.argsort(keys[order], kind="stable")]
        left_keys, right_keys = keys[order], keys[right]
        sums = np.cumsum(np.pad(weights[order], ((1, 0), (0, 0))), axis=0)
        start = right_keys - right_keys % num_ranks
        # Keys are whole numbers: the left keys up to k are those below k + 1.
        below, up_to, before, after = (
            sums[np.searchsorted(left_keys, key)]
            for key in (right_keys, right_keys + 1, start, start + num_ranks)
        )
        total += (weights[right] * (below + up_to - before - after)).sum(axis=0)
        width *= 2
    return total


def of_counts(
    weights: Floats,
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    metric: Callable[[Counts], float],
    *,
    num_classes: int,
) -> Floats:
    """Return a metric of the confusion matrix of each draw."""
    cells = np.eye(num_classes**2)[rows * num_classes + columns]
    tables = np.rint(weights @ cells).astype(np.int64).reshape(-1, num_classes, num_classes)
    return np.array([metric(table) for table in tables])


def _without_rounding(values: Floats) -> Floats:
    """Return zeros for a series that is constant up to rounding."""
    largest = np.abs(values).max(initial=0.0)
    constant = not np.ptp(values) > _ROUNDING * largest if len(values) else True
    return np.zeros_like(values) if constant else values


def _centred(values: Floats) -> Floats:
    """Center values and scale them to at most 1, so that squares neither overflow nor underflow."""
    values = _without_rounding(values)
    centred = values - values.mean() if len(values) else values
    largest = np.abs(centred).max(initial=0.0)
    scaled: Floats = centred / largest if largest > 0 else centred
    return scaled


def _ranks(weights: Floats, values: Floats) -> Floats:
    """Return the mean rank of each item in each draw, scaled to -0.5 ... 0.5."""
    values = _without_rounding(values)
    counts = _counts_of_values(weights, values)
    places = np.unique(values, return_inverse=True)[1]
    middle = (np.cumsum(counts, axis=1) - counts / 2) / weights.sum(axis=1, keepdims=True)
    ranks: Floats = middle[:, places] - 0.5
    return ranks


def _counts_of_values(weights: Floats, values: Floats) -> Floats:
    """Return the count of each distinct value, or of each distinct row, in each draw."""
    places = np.unique(values, axis=0, return_inverse=True)[1].reshape(-1)
    order = np.argsort(places, kind="stable")
    starts = np.flatnonzero(np.diff(places[order], prepend=-1))
    counts: Floats = np.add.reduceat(weights[:, order], starts, axis=1)
    return counts


def _correlate(weights: Floats, first: Floats, second: Floats) -> Floats:
    """Return the correlation of two series of one row, or of one row per draw."""
    size = weights.sum(axis=1)

    def average(values: Floats) -> Floats:
        found: Floats = (weights * values).sum(axis=1) / size
        return found

    mean_first, mean_second = average(first), average(second)
    together = average(first * second) - mean_first * mean_second
    spreads = [average(each**2) - middle**2 for each, middle in ((first, mean_first), (second, mean_second))]
    spreads = [np.where(each > _ROUNDING, each, 0.0) for each in spreads]
    return np.clip(_divide(together, np.sqrt(spreads[0] * spreads[1])), -1.0, 1.0)


def _divide(above: Floats, below: Floats) -> Floats:
    found: Floats = np.divide(above, below, out=np.full(len(above), np.nan), where=below > 0)
    return found


def are_within(expected: ArrayLike, found: ArrayLike, *, distance: float) -> NDArray[np.bool_]:
    """Return which scores differ by at most `distance`; False for NaN."""
    difference = np.abs(np.asarray(found, np.float64) - np.asarray(expected, np.float64))
    # Scores are sums of decimal fractions: 8.7 - 7.7 is a little more than 1.
    near: NDArray[np.bool_] = difference <= distance * (1 + 1e-9)
    return near


def confusion_matrix(rows: NDArray[np.int64], columns: NDArray[np.int64], *, num_classes: int) -> Counts:
    """Return the confusion matrix of classes numbered from 0: rows expected, columns found."""
    counted = np.bincount(rows * num_classes + columns, minlength=num_classes**2)
    return counted.reshape(num_classes, num_classes)


def accuracy(counts: Counts) -> float:
    total = int(counts.sum())
    return float(np.trace(counts)) / total if total else math.nan


def macro_f1(counts: Counts) -> float:
    """Return the mean F1 of the classes that occur, expected or found."""
    expected, found, hits = counts.sum(axis=1), counts.sum(axis=0), np.diag(counts)
    occurs = (expected + found) > 0
    return float((2 * hits[occurs] / (expected + found)[occurs]).mean()) if occurs.any() else math.nan


def cohen_kappa(counts: Counts, *, quadratic: bool = False) -> float:
    """Return Cohen's kappa, with quadratic weights on request; NaN where both sides have the same single class."""
    total = int(counts.sum())
    if not total:
        return math.nan
    by_chance = np.outer(counts.sum(axis=1), counts.sum(axis=0)) / total
    place = np.arange(len(counts), dtype=np.float64)
    distance = place[:, None] - place[None, :]
    penalties = distance**2 if quadratic else (distance != 0) * 1.0
    expected = float((penalties * by_chance).sum())
    return 1.0 - float((penalties * counts).sum()) / expected if expected else math.nan


def reliability(confidence: ArrayLike, correct: ArrayLike) -> list[dict[str, Any]]:
    """Return confidence and accuracy in each non-empty bin of the confidence; a bin includes its upper end."""
    sure, right = np.asarray(confidence, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    place = np.clip(np.ceil(sure * NUM_BINS).astype(np.int64) - 1, 0, NUM_BINS - 1)
    return [
        {
            "low": number / NUM_BINS,
            "high": (number + 1) / NUM_BINS,
            "count": int(inside.sum()),
            "confidence": float(sure[inside].mean()),
            "accuracy": float(right[inside].mean()),
        }
        for number in range(NUM_BINS)
        if (inside := place == number).any()
    ]


def expected_calibration_error(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Return the mean gap between confidence and accuracy over the bins, weighted by their counts."""
    bins = reliability(confidence, correct)
    total = sum(each["count"] for each in bins)
    distance = sum(each["count"] * abs(each["confidence"] - each["accuracy"]) for each in bins)
    return distance / total if total else math.nan


def fit_temperature(log_probs: Floats, targets: Floats) -> float:
    """Return the temperature with the lowest cross entropy to `targets`, distributions over the labels."""
    if not len(log_probs):
        return 1.0
    losses = [-(targets * log_softmax(log_probs / t)).sum(axis=1).mean() for t in _TEMPERATURES]
    return float(_TEMPERATURES[int(np.argmin(losses))])


def soften(probs: Floats, temperature: float) -> Floats:
    """Return probabilities at a different temperature."""
    softened: Floats = np.exp(log_softmax(np.log(np.maximum(probs, 1e-300)) / temperature))
    return softened


def log_softmax(values: Floats) -> Floats:
    shifted = values - values.max(axis=-1, keepdims=True)
    found: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return found


def rouge_l(reference: str, text: str) -> float:
    """Return the F1 of the longest common subsequence of words, in lower case; 1 for two strings without words."""
    first, second = _WORD.findall(reference.lower()), _WORD.findall(text.lower())
    if not first and not second:
        return 1.0
    row = [0] * (len(second) + 1)  # of the table of subsequence lengths
    for word in first:
        diagonal = 0
        for place, other in enumerate(second, start=1):
            above = row[place]
            row[place] = diagonal + 1 if word == other else max(above, row[place - 1])
            diagonal = above
    return 2 * row[-1] / (len(first) + len(second))
