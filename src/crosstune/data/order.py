"""Compute the examples of a step from the seed and the step number, for any number of devices."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from crosstune.data.mixture import Mixture


@lru_cache(maxsize=2)
def epoch_order(
    num_examples: int, *, seed: int, epoch: int, mixture: Mixture | None = None
) -> NDArray[np.int64]:
    """Return the examples of an epoch in their order: each once, or as a mixture draws them."""
    order = np.random.Generator(np.random.Philox(key=(seed, epoch))).permutation(num_examples)
    return order if mixture is None else mixture.epoch(epoch, seed=seed)[order]


def rows_in_epochs(num_examples: int, num_epochs: float) -> int:
    """Return the number of rows in `num_epochs` epochs, rounded up; the last epoch may be partial."""
    return math.ceil(round(num_examples * num_epochs, 6))


def steps_of_rows(num_rows: int, *, rows_per_step: int, num_epochs: float, max_steps: int) -> int:
    """Return the number of steps for the rows of all epochs, at most max_steps; the last may have fewer rows."""
    by_epochs = math.ceil(num_rows / rows_per_step)
    if max_steps == -1:
        return by_epochs
    return max_steps if num_epochs == 0 else min(max_steps, by_epochs)


def rows_of_step(
    step: int,
    *,
    num_examples: int,
    rows_per_step: int,
    num_rows_in_all: int,
    seed: int,
    mixture: Mixture | None = None,
) -> list[int]:
    """Return the example indices of optimizer step `step`, counted from 0. A step may span two epochs."""
    first = step * rows_per_step
    last = min(first + rows_per_step, num_rows_in_all)
    indices: list[int] = []
    while first < last:
        epoch, place = divmod(first, num_examples)
        order = epoch_order(num_examples, seed=seed, epoch=epoch, mixture=mixture)
        indices += order[place : place + last - first].tolist()
        first = min(last, (epoch + 1) * num_examples)
    return indices
