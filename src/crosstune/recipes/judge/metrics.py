"""Compute a judge's metrics: correlation, agreement, calibration, ROUGE-L and bootstrap intervals.

A metric returns NaN where it is undefined. A metric of labels (accuracy, kappa) takes a confusion matrix.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Places = NDArray[np.int64]
"""Indices of items; a bootstrap draw repeats some."""
Counts = NDArray[np.int64]
"""A confusion matrix: rows expected, columns found."""
NUM_DRAWS = 1000
NUM_BINS = 10
LEVEL = 0.95
_ROUNDING = 1e-13
"""Relative spread below which a series is constant."""
_TEMPERATURES = np.exp(np.linspace(math.log(0.05), math.log(20.0), 241))
_WORD = re.compile(r"\w+")


def bootstrap_draws(
    count: int, *, groups: Sequence[str] = (), num_draws: int = NUM_DRAWS
) -> Iterator[Places]:
    """Yield items drawn with replacement; whole groups if there are several, since their items are dependent."""
    members: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        members.setdefault(group, []).append(place)
    rows = list(map(np.array, members.values()))
    size = len(rows) if len(rows) > 1 else count
    draw = np.random.Generator(np.random.Philox(key=(0, count)))
    for _ in range(num_draws):
        drawn = draw.integers(0, size, size=size)
        yield np.concatenate([rows[group] for group in drawn]) if 1 < size < count else drawn


def intervals(
    metrics: Mapping[str, Callable[[Places], float]], draws: Iterable[Places]
) -> dict[str, list[float]]:
    """Return the percentile intervals of the metrics that are defined in at least half of the draws."""
    values = np.array([[metric(places) for metric in metrics.values()] for places in draws])
    found: dict[str, list[float]] = {}
    for name, column in zip(metrics, values.T, strict=True):
        finite = column[np.isfinite(column)]
        if len(finite) and len(finite) * 2 >= len(column):
            found[name] = np.quantile(finite, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    return found


def pearson(first: Floats, second: Floats) -> float:
    """Return Pearson's r."""
    first, second = _centered(first), _centered(second)
    spread = math.sqrt(float((first**2).sum()) * float((second**2).sum()))
    return min(1.0, max(-1.0, float((first * second).sum()) / spread)) if spread else math.nan


def spearman(first: Floats, second: Floats) -> float:
    """Return Spearman's rho: Pearson's r of the ranks, where ties share their mean rank."""
    ranks = []
    for places in (_numbered(first), _numbered(second)):
        counts = np.bincount(places)
        ranks.append((np.cumsum(counts) - counts / 2)[places])
    return pearson(*ranks)


def kendall(first: Floats, second: Floats) -> float:
    """Return Kendall's tau-b."""
    x, y = _numbered(first).tolist(), _numbered(second).tolist()
    pairs = sorted(zip(x, y, strict=True))
    seen, descending = list[int](), 0
    for number, (_, value) in enumerate(pairs):
        place = bisect_right(seen, value)
        descending += number - place
        seen.insert(place, value)
    groups = ([len(x)], Counter(x).values(), Counter(y).values(), Counter(pairs).values())
    every, ties_x, ties_y, ties = (sum(size * (size - 1) // 2 for size in sizes) for sizes in groups)
    spread = math.sqrt(every - ties_x) * math.sqrt(every - ties_y)
    return (every - ties_x - ties_y + ties - 2 * descending) / spread if spread else math.nan


def _centered(values: Floats) -> Floats:
    """Center values and scale them to at most 1, so that squares neither overflow nor underflow."""
    centered = values - values.mean()
    largest = np.abs(centered).max()
    return centered / largest if largest > _ROUNDING * np.abs(values).max() else centered * 0


def _numbered(values: Floats) -> Places:
    """Return the index of each value among the sorted distinct values; zeros for a constant series."""
    return np.unique(values if _centered(values).any() else values * 0, return_inverse=True)[1]


def are_within(expected: ArrayLike, found: ArrayLike, *, distance: float) -> NDArray[np.bool_]:
    """Return which scores differ by at most `distance`; False for NaN."""
    difference = np.abs(np.asarray(found, np.float64) - np.asarray(expected, np.float64))
    # In floating point, 8.7 - 7.7 is a little more than 1.
    return difference <= distance * (1 + 1e-9)


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


def expected_calibration_error(bins: Sequence[Mapping[str, float]]) -> float:
    """Return the mean gap between confidence and accuracy over the bins of `reliability`, weighted by their counts."""
    total = sum(each["count"] for each in bins)
    return sum(each["count"] * abs(each["confidence"] - each["accuracy"]) for each in bins) / total


def fit_temperature(log_probs: Floats, targets: Floats) -> float:
    """Return the temperature with the lowest cross entropy to `targets`, distributions over the labels."""
    losses = [-(targets * log_softmax(log_probs / t)).sum(axis=1).mean() for t in _TEMPERATURES]
    return float(_TEMPERATURES[int(np.argmin(losses))])


def soften(probs: Floats, temperature: float) -> Floats:
    """Return probabilities at a different temperature."""
    return np.exp(log_softmax(np.log(np.maximum(probs, 1e-300)) / temperature))


def log_softmax(values: Floats) -> Floats:
    shifted = values - values.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


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
