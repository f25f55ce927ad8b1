"""Compute agreement between classes: confusion, accuracy, macro-F1, Cohen's kappa with and without weights."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]


def confusion(
    expected: Sequence[Hashable], found: Sequence[Hashable], *, classes: Sequence[Hashable]
) -> Counts:
    """Count the pairs of classes: rows are the expected ones, columns the found ones. A value that is no class raises."""
    places = {name: place for place, name in enumerate(classes)}
    pairs = [(places[one], places[other]) for one, other in zip(expected, found, strict=True)]
    rows, columns = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return count_pairs(rows, columns, num_classes=len(classes))


def count_pairs(rows: NDArray[np.int64], columns: NDArray[np.int64], *, num_classes: int) -> Counts:
    """Count the pairs of classes that are given as numbers from 0."""
    counted = np.bincount(rows * num_classes + columns, minlength=num_classes**2)
    return counted.reshape(num_classes, num_classes)


def accuracy(counts: Counts) -> float:
    total = int(counts.sum())
    return float(np.trace(counts)) / total if total else math.nan


def macro_f1(counts: Counts) -> float:
    """Return the mean F1 of the classes that occur, expected or found."""
    expected, found, hits = counts.sum(axis=1), counts.sum(axis=0), np.diag(counts)
    occurs = (expected + found) > 0
    if not occurs.any():
        return math.nan
    return float((2 * hits[occurs] / (expected + found)[occurs]).mean())


def cohen_kappa(counts: Counts, *, quadratic: bool = False) -> float:
    """Return Cohen's kappa; with `quadratic`, a miss weighs the square of its distance in the order of the classes.

    NaN where both sides have the same single class, so that chance explains everything.
    """
    total = int(counts.sum())
    if not total:
        return math.nan
    by_chance = np.outer(counts.sum(axis=1), counts.sum(axis=0)) / total
    place = np.arange(len(counts), dtype=np.float64)
    weights = (
        (place[:, None] - place[None, :]) ** 2 if quadratic else (place[:, None] != place[None, :]) * 1.0
    )
    expected = float((weights * by_chance).sum())
    return 1.0 - float((weights * counts).sum()) / expected if expected else math.nan
