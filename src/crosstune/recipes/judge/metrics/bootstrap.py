"""Estimate confidence intervals by the bootstrap: the metric over items drawn again with replacement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def interval(
    metric: Callable[[NDArray[np.int64]], float],
    count: int,
    *,
    groups: Sequence[str] | None = None,
    num_draws: int = NUM_DRAWS,
    level: float = 0.95,
    seed: int = 0,
) -> Interval | None:
    """Return the percentile interval of `metric`, a function of the indices of the items that are drawn.

    With `groups`, whole groups are drawn: items of one source are not independent. Draws where the metric is undefined
    are left out; None if more than half of them are.
    """
    if count < 2:
        return None
    draw = np.random.Generator(np.random.Philox(key=(seed, count)))
    members = _members(groups, count)
    values = []
    for _ in range(num_draws):
        chosen = draw.integers(0, len(members), size=len(members))
        values.append(metric(np.concatenate([members[place] for place in chosen])))
    finite = np.array([value for value in values if np.isfinite(value)])
    if len(finite) * 2 < num_draws:
        return None
    low, high = np.quantile(finite, [(1 - level) / 2, (1 + level) / 2])
    return Interval(low=float(low), high=float(high))


def _members(groups: Sequence[str] | None, count: int) -> list[NDArray[np.int64]]:
    """Return the indices of the items of each group; each item is its own without groups, or if there is only one."""
    found: dict[str, list[int]] = {}
    for place, group in enumerate(groups or ()):
        found.setdefault(group, []).append(place)
    if len(found) < 2:
        return [np.array([place]) for place in range(count)]
    return [np.array(places) for places in found.values()]
