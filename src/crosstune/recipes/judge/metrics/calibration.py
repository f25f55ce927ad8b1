"""Measure how well confidence matches accuracy, and fit the temperature that makes it match."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_BINS = 10
_TEMPERATURES = np.exp(np.linspace(math.log(0.05), math.log(20.0), 241))


@dataclass(frozen=True, kw_only=True)
class Bin:
    """The items whose confidence is in one interval."""

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


def reliability(confidence: ArrayLike, correct: ArrayLike, *, num_bins: int = NUM_BINS) -> list[Bin]:
    """Return the occupied ones of `num_bins` intervals of equal width; each includes its upper end."""
    sure, right = np.asarray(confidence, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    place = np.clip(np.ceil(sure * num_bins).astype(np.int64) - 1, 0, num_bins - 1)
    return [
        Bin(
            low=number / num_bins,
            high=(number + 1) / num_bins,
            count=int(inside.sum()),
            confidence=float(sure[inside].mean()),
            accuracy=float(right[inside].mean()),
        )
        for number in range(num_bins)
        if (inside := place == number).any()
    ]


def expected_calibration_error(
    confidence: ArrayLike, correct: ArrayLike, *, num_bins: int = NUM_BINS
) -> float:
    """Return the mean distance between confidence and accuracy over the bins, weighted by their items."""
    bins = reliability(confidence, correct, num_bins=num_bins)
    total = sum(each.count for each in bins)
    return (
        sum(each.count * abs(each.confidence - each.accuracy) for each in bins) / total if total else math.nan
    )


def fit_temperature(log_probs: NDArray[np.float64], targets: NDArray[np.float64]) -> float:
    """Return the temperature with the lowest cross entropy to the `targets`, which are distributions over the labels."""
    if not len(log_probs):
        return 1.0
    losses = [-(targets * _log_softmax(log_probs / t)).sum(axis=1).mean() for t in _TEMPERATURES]
    return float(_TEMPERATURES[int(np.argmin(losses))])


def soften(probs: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    """Return probabilities at another temperature."""
    softened: NDArray[np.float64] = np.exp(_log_softmax(np.log(np.maximum(probs, 1e-300)) / temperature))
    return softened


def _log_softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = values - values.max(axis=-1, keepdims=True)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return found
