"""Estimate confidence intervals by the bootstrap: the metric over items drawn again with replacement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_DRAWS = 1000


@dataclass(frozen=True, kw_only=True)
class Interval:
    low: float
    high: float

    def to_json(self) -> list[float]:
        return [self.low, self.high]


def draw_weights(
    count: int, *, groups: Sequence[str] | None = None, num_draws: int = NUM_DRAWS, seed: int = 0
) -> NDArray[np.float64]:
    """Return how often each item is drawn, a row for each draw with replacement.

    With `groups`, whole groups are drawn: items of one source are not independent.
    """
    place = _group_of_items(groups, count)
    num_groups = int(place.max(initial=-1)) + 1
    draw = np.random.Generator(np.random.Philox(key=(seed, count)))
    weights = np.zeros((num_draws, num_groups))
    for row in weights:
        row += np.bincount(draw.integers(0, num_groups, size=num_groups), minlength=num_groups)
    return weights[:, place]


def interval(values: NDArray[np.float64], *, level: float = 0.95) -> Interval | None:
    """Return the percentile interval of a metric from its value in each draw.

    Draws where it is undefined are left out; None if more than half of them are.
    """
    finite = values[np.isfinite(values)]
    if not len(finite) or len(finite) * 2 < len(values):
        return None
    low, high = np.quantile(finite, [(1 - level) / 2, (1 + level) / 2])
    return Interval(low=float(low), high=float(high))


def _group_of_items(groups: Sequence[str] | None, count: int) -> NDArray[np.int64]:
    """Return the number of each item's group; each item is its own without groups, or if there is only one."""
    numbers: dict[str, int] = {}
    places = [numbers.setdefault(group, len(numbers)) for group in groups or ()]
    return np.array(places) if len(numbers) > 1 else np.arange(count)
