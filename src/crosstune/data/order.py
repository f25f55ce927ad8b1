"""Which examples make up which step: a function of seed and position alone, the same on any number of devices."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@lru_cache(maxsize=2)
def epoch_order(num_examples: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.Philox(key=(seed, epoch))).permutation(num_examples)


def rows_in_epochs(num_examples: int, num_epochs: float) -> int:
    """Rows of so many epochs, the last of which may be a part of one; at least one row of any part."""
    return math.ceil(round(num_examples * num_epochs, 6))


def total_steps(num_examples: int, *, rows_per_step: int, num_epochs: float, max_steps: int) -> int:
    """Steps until every epoch is done, the last one perhaps with fewer rows; cut at max_steps."""
    num_rows = rows_in_epochs(num_examples, num_epochs)
    return steps_of_rows(num_rows, rows_per_step=rows_per_step, num_epochs=num_epochs, max_steps=max_steps)


def steps_of_rows(num_rows: int, *, rows_per_step: int, num_epochs: float, max_steps: int) -> int:
    by_epochs = math.ceil(num_rows / rows_per_step)
    if max_steps == -1:
        return by_epochs
    return max_steps if num_epochs == 0 else min(max_steps, by_epochs)


def rows_of_step(
    step: int, *, num_examples: int, rows_per_step: int, num_rows_in_all: int, seed: int
) -> list[int]:
    """Indices of the examples of optimizer step `step`, counted from 0. Epochs follow each other without a gap."""
    first = step * rows_per_step
    last = min(first + rows_per_step, num_rows_in_all)
    indices = []
    for position in range(first, last):
        epoch, place = divmod(position, num_examples)
        indices.append(int(epoch_order(num_examples, seed=seed, epoch=epoch)[place]))
    return indices
