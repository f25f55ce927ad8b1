"""Check the criteria of the optimisation guide: speed, memory, finite steps, falling loss, processes, checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from crosstune.checkpoint.folders import FOLDER as CHECKPOINTS
from crosstune.checkpoint.read import newest_valid
from crosstune.core.json_files import read_object
from crosstune.ladder.compare import Comparison
from crosstune.ladder.trial import Trial, middle

SPEED_WANTED, MEMORY_WANTED, FINITE_STEPS_WANTED = 0.25, 0.30, 1000
Answer = Literal["yes", "no", "cannot say"]


@dataclass(frozen=True)
class Criterion:
    what: str
    measured: str
    met: Answer


def check_criteria(ends: Comparison | None, validation: Trial, *, validated: Path) -> list[Criterion]:
    """Return the criteria of the optimisation guide with their measurements."""
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
        return Criterion(what, "nothing was kept" if ends is None else "failed", "no")
    is_sure = ends.spread < abs(ends.speed - 1 - SPEED_WANTED)
    by = " by processor time" if ends.by_cpu_time else ""
    measured = f"{_change(ends.speed)}{by} (trials differ by {ends.spread:.0%})"
    return Criterion(what, measured, _answer(ends.speed >= 1 + SPEED_WANTED) if is_sure else "cannot say")


def _memory(ends: Comparison | None) -> Criterion:
    what = f"memory at least {MEMORY_WANTED:.0%} lower"
    if ends is None or ends.failed is not None or math.isnan(ends.memory):
        return Criterion(what, "nothing was kept" if ends is None else "failed", "no")
    return Criterion(what, _change(ends.memory), _answer(ends.memory <= 1 - MEMORY_WANTED))


def _answer(is_met: bool) -> Answer:
    return "yes" if is_met else "no"


def _change(ratio: float) -> str:
    return f"{ratio - 1:+.0%}" if round(100 * (ratio - 1)) else "no change"


def _finite(ends: Comparison | None, validation: Trial) -> Criterion:
    """Count the steps of all trials with the final options."""
    trials = [*(ends.new if ends else ()), validation]
    steps, bad = sum(len(trial.rows) for trial in trials), sum(trial.num_nonfinite for trial in trials)
    what = f"no gradient that is not finite in {FINITE_STEPS_WANTED:,} steps"
    if bad or steps >= FINITE_STEPS_WANTED:
        return Criterion(what, f"{bad} in {steps:,} steps", _answer(not bad))
    return Criterion(what, f"0 in {steps:,} steps, too few to say", "cannot say")


def _falling(validation: Trial) -> Criterion:
    what, losses = "loss falling", [value for value in validation.values("loss") if not math.isnan(value)]
    fifth = len(losses) // 5
    if not fifth:
        return Criterion(what, f"{len(losses)} steps are too few to say", "cannot say")
    first, last = middle(losses[:fifth]), middle(losses[-fifth:])
    return Criterion(what, f"{first:.4f} -> {last:.4f}", _answer(last < first))


def _processes(validation: Trial, validated: Path) -> Criterion:
    what = "several processes work"
    if not validation.finished:
        return Criterion(what, validation.error, "cannot say")
    world = read_object(validated / "plan.json").get("world_size")
    if isinstance(world, int) and world > 1:
        return Criterion(what, f"{world} processes trained", "yes")
    return Criterion(what, "not tried: the options have one process; see --world_size", "cannot say")


def _checkpoints(validation: Trial, validated: Path) -> Criterion:
    what = "checkpoints valid"
    if not validation.finished:
        return Criterion(what, validation.error, "no")
    damaged: list[str] = []
    found = newest_valid(validated / CHECKPOINTS, on_damaged=lambda error: damaged.append(str(error)))
    if found is None or damaged:
        return Criterion(what, f"{len(damaged)} are damaged", "no")
    kept = list((validated / CHECKPOINTS).glob("step-*"))
    return Criterion(what, f"{len(kept)} kept, the newest verified", "yes")
