"""Compute learning-rate schedules, the same numbers for every engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

SCHEDULES = ("constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "exponential")
SCHEDULES_WITH_FLOOR = ("cosine", "cosine_with_restarts", "exponential")
"""Schedules that use `floor_ratio`, the fraction of the peak at which they end."""
NUM_CYCLES = 3
POLYNOMIAL_POWER = 2.0
ON_EXTEND = ("stretch", "constant", "restart")
"""The schedule of a run that is resumed with more steps."""


@dataclass(frozen=True, kw_only=True)
class Extension:
    """The schedule of a resumed run from a step on."""

    start: int
    lr: float | None
    """A constant learning rate; None for a new schedule over the steps from `start`."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> Extension | None:
        return cls(start=data["start"], lr=data["lr"]) if data else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def warmup_steps(*, schedule: str, num_steps: int, steps: int | None, ratio: float | None) -> int:
    """Return the number of warm-up steps: by default a tenth for a decaying schedule, none for a constant one."""
    if steps is None:
        if ratio is None:
            ratio = 0.0 if schedule == "constant" else 0.1
        steps = round(num_steps * ratio)
    return min(steps, num_steps)


def learning_rate(
    step: int, *, peak: float, schedule: str, num_steps: int, warmup: int, floor_ratio: float
) -> float:
    """Return the learning rate of a step, counted from 0: a linear warm-up to `peak`, then the decay of the schedule."""
    if step < warmup:
        # Unlike step / warmup in transformers, the first step has a learning rate above 0.
        return peak * (step + 1) / warmup
    span = max(1, num_steps - warmup)
    progress = min(1.0, (step - warmup) / span)
    return peak * _decay(schedule, progress, floor_ratio)


def _decay(schedule: str, progress: float, floor_ratio: float) -> float:
    """Return the fraction of the peak; `progress` is 0 after the warm-up and 1 at the end."""
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "polynomial":
        return float((1.0 - progress) ** POLYNOMIAL_POWER)
    if schedule == "exponential":
        # Reaches the floor exactly at the end. An exponential cannot reach zero, so the floor is at least 1e-3.
        return float(max(floor_ratio, 1e-3) ** progress)
    assert schedule in ("cosine", "cosine_with_restarts"), schedule
    if schedule == "cosine_with_restarts" and progress < 1.0:
        progress = (progress * NUM_CYCLES) % 1.0
    shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    return floor_ratio + (1.0 - floor_ratio) * shape
