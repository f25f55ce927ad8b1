"""Check what an optimisation should have come to: speed, memory, finite steps, a falling loss, processes, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from crosstune.checkpoint.folders import FOLDER as CHECKPOINTS
from crosstune.checkpoint.read import newest_valid
from crosstune.ladder.compare import Comparison
from crosstune.ladder.trial import Trial, middle

SPEED_WANTED, MEMORY_WANTED, FINITE_STEPS_WANTED = 0.25, 0.30, 1000
Answer = Literal["yes", "no", "cannot say"]


@dataclass(frozen=True, kw_only=True)
class Criterion:
    what: str
    measured: str
    met: Answer

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_criteria(ends: Comparison | None, validation: Trial, *, validated: Path) -> list[Criterion]:
    """Return the criteria of the optimisation guide with what was measured."""
    return [
        _speed(ends),
        _memory(ends),
        _finite(ends, validation),
        _falling(validation),
        _processes(validation, validated),
        _checkpoints(validation, validated),
    ]


def _speed(ends: Comparison | None) -> Criterion:
    what = f"speed at least {SPEED_WANTED:.0%} higher"
    if ends is None or ends.failed is not None:
        return Criterion(what=what, measured="nothing was kept" if ends is None else "failed", met="no")
    if ends.spread >= abs(ends.speed - 1 - SPEED_WANTED):
        met: Answer = "cannot say"
    else:
        met = "yes" if ends.speed >= 1 + SPEED_WANTED else "no"
    return Criterion(
        what=what,
        measured=f"{_change(ends.speed)}{' by processor time' if ends.by_cpu_time else ''} (trials differ by "
        f"{ends.spread:.0%})",
        met=met,
    )


def _memory(ends: Comparison | None) -> Criterion:
    what = f"memory at least {MEMORY_WANTED:.0%} lower"
    if ends is None or ends.failed is not None or math.isnan(ends.memory):
        return Criterion(what=what, measured="nothing was kept" if ends is None else "failed", met="no")
    met: Answer = "yes" if ends.memory <= 1 - MEMORY_WANTED else "no"
    return Criterion(what=what, measured=_change(ends.memory), met=met)


def _change(ratio: float) -> str:
    return f"{ratio - 1:+.0%}" if round(100 * (ratio - 1)) else "no change"


def _finite(ends: Comparison | None, validation: Trial) -> Criterion:
    """Count the steps of all trials with the final options."""
    trials = [*(ends.new if ends else ()), validation]
    steps, bad = sum(len(trial.rows) for trial in trials), sum(trial.num_nonfinite for trial in trials)
    enough = steps >= FINITE_STEPS_WANTED
    return Criterion(
        what=f"no gradient that is not finite in {FINITE_STEPS_WANTED:,} steps",
        measured=f"{bad} in {steps:,} steps" + ("" if enough or bad else ", which is too few to say"),
        met="no" if bad else "yes" if enough else "cannot say",
    )


def _falling(validation: Trial) -> Criterion:
    losses = [value for value in validation.values("loss") if not math.isnan(value)]
    fifth = len(losses) // 5
    if not fifth:
        return Criterion(
            what="loss falling", measured=f"{len(losses)} steps are too few to say", met="cannot say"
        )
    first, last = middle(losses[:fifth]), middle(losses[-fifth:])
    return Criterion(
        what="loss falling", measured=f"{first:.4f} -> {last:.4f}", met="yes" if last < first else "no"
    )


def _processes(validation: Trial, validated: Path) -> Criterion:
    from crosstune.core.json_files import read_object

    what = "several processes work"
    if not validation.finished:
        return Criterion(what=what, measured=validation.error, met="cannot say")
    world = read_object(validated / "plan.json").get("world_size")
    if isinstance(world, int) and world > 1:
        return Criterion(what=what, measured=f"{world} processes trained", met="yes")
    return Criterion(
        what=what, measured="not tried: the options have one process; see --world_size", met="cannot say"
    )


def _checkpoints(validation: Trial, validated: Path) -> Criterion:
    what = "checkpoints valid"
    if not validation.finished:
        return Criterion(what=what, measured=validation.error, met="no")
    damaged: list[str] = []
    found = newest_valid(validated / CHECKPOINTS, on_damaged=lambda error: damaged.append(str(error)))
    if found is None or damaged:
        return Criterion(what=what, measured=f"{len(damaged)} are damaged", met="no")
    kept = sorted(path.name for path in (validated / CHECKPOINTS).glob("step-*"))
    return Criterion(what=what, measured=f"{len(kept)} kept, the newest verified", met="yes")


def met(criteria: Sequence[Criterion]) -> int:
    """Return how many are met."""
    return sum(criterion.met == "yes" for criterion in criteria)
