"""Compare a change with the baseline in alternating trials, judge it, and check the criteria of the whole ladder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from crosstune.checkpoint.folders import FOLDER as CHECKPOINTS
from crosstune.checkpoint.read import newest_valid
from crosstune.files.json_files import read_object
from crosstune.ladder.rung import AsGood, Gain, LossPromise, SameBits
from crosstune.ladder.trial import Trial, Trials, median
from crosstune.report.files import number

SMALLEST_GAIN = 0.02
"""The smallest gain of speed that is worth an option."""
SMALLEST_SAVING = 0.05
"""The smallest saving of memory that is worth an option."""
UNSTEADY = 0.15
"""A larger difference between trials of the same options means that something else uses the machine."""
TURNS = ("base", "new", "new", "base")
SPEED_WANTED, MEMORY_WANTED, FINITE_STEPS_WANTED = 0.25, 0.30, 1000
"""The criteria of the optimization guide."""
Answer = Literal["yes", "no", "cannot say"]
Goal = Literal["speed", "memory"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Trials of the baseline and of a change."""

    base: Sequence[Trial]
    new: Sequence[Trial]

    @property
    def failed(self) -> Trial | None:
        return next((trial for trial in [*self.base, *self.new] if not trial.finished), None)

    @property
    def speed(self) -> float:
        """The speed of the change relative to the baseline."""
        return _ratio([self.rate(t) for t in self.new], [self.rate(t) for t in self.base])

    @property
    def memory(self) -> float:
        """The peak memory of the change relative to the baseline."""
        return _ratio([float(t.peak_bytes) for t in self.new], [float(t.peak_bytes) for t in self.base])

    def rate(self, trial: Trial) -> float:
        return trial.tokens_per_cpu_s if self.by_cpu_time else trial.tokens_per_s

    @property
    def by_cpu_time(self) -> bool:
        """True if CPU time is compared: on a busy CPU it varies less than wall time."""
        if self.time_spread <= UNSTEADY or not all(t.tokens_per_cpu_s for t in [*self.base, *self.new]):
            return False
        return self._spread(lambda trial: trial.tokens_per_cpu_s) < self.time_spread

    @property
    def spread(self) -> float:
        """The largest relative difference of speed between trials of the same options."""
        return self._spread(self.rate)

    @property
    def time_spread(self) -> float:
        """The same by wall time."""
        return self._spread(lambda trial: trial.tokens_per_s)

    def _spread(self, rate: Callable[[Trial], float]) -> float:
        sides = [[rate(trial) for trial in side] for side in (self.base, self.new)]
        return max((max(side) - min(side)) / max(median(side), 1e-12) for side in sides if side)

    def to_json(self) -> dict[str, Any]:
        return {
            "speed": self.speed,
            "memory": self.memory,
            "spread": self.spread,
            "by_cpu_time": self.by_cpu_time,
            "base": [trial.to_json() for trial in self.base],
            "new": [trial.to_json() for trial in self.new],
        }


@dataclass(frozen=True)
class Verdict:
    """The decision to keep a change or not, and the reason."""

    kept: bool
    why: str


def compare(
    trials: Trials,
    name: str,
    *,
    base: Mapping[str, Any],
    new: Mapping[str, Any],
    on_trial: Callable[[str], None] = lambda name: None,
) -> Comparison:
    """Run baseline and change in the order A B B A, so that drift favors neither. Stop at a failure."""
    sides: dict[str, list[Trial]] = {"base": [], "new": []}
    for turn, side in enumerate(TURNS):
        trial_name = f"{name}-{turn + 1}-{side}"
        on_trial(trial_name)
        sides[side].append(trials.run(trial_name, base if side == "base" else new))
        if not sides[side][-1].finished:
            break
    return Comparison(base=sides["base"], new=sides["new"])


def judge(comparison: Comparison, *, promise: LossPromise, gain: Gain, goal: Goal) -> Verdict:
    """Accept a change if it keeps its promise about the loss and helps."""
    if (failed := comparison.failed) is not None:
        words = {"out_of_memory": "out of memory", "too_slow": "too slow"}.get(failed.status, "failed")
        return Verdict(False, f"{words}: {failed.error}")
    if broken := broken_promise(comparison, promise):
        return Verdict(False, broken)
    num_nonfinite = sum(trial.num_nonfinite for trial in comparison.new)
    if num_nonfinite > sum(trial.num_nonfinite for trial in comparison.base):
        return Verdict(False, f"{num_nonfinite} steps were not finite")
    return _weigh(comparison, gain=gain, goal=goal)


def broken_promise(comparison: Comparison, promise: LossPromise) -> str:
    """Describe how the losses break the promise; empty if they keep it."""
    if isinstance(promise, AsGood):
        return _worse(comparison, promise)
    own = max((_difference(comparison.base[0], trial) for trial in comparison.base[1:]), default=0.0)
    found = max(_difference(comparison.base[0], trial) for trial in comparison.new)
    bound = 0.0 if isinstance(promise, SameBits) else promise.bound
    if found <= max(bound, 2 * own):
        return ""
    repeats = f"; the baseline repeats itself within {own:.1e}" if own else ""
    return f"the loss differs by {found:.1e}, promised: {promise.text}{repeats}"


def _worse(comparison: Comparison, promise: AsGood) -> str:
    sides = [*comparison.base, *comparison.new]
    until = min(sum(_weights(trial)) for trial in sides)
    before = median([_tail(trial, promise.metric, until=until) for trial in comparison.base])
    after = median([_tail(trial, promise.metric, until=until) for trial in comparison.new])
    if math.isnan(before) or math.isnan(after):
        return f"{promise.metric} was not measured on both sides"
    loss = (before - after if promise.higher_is_better else after - before) / max(abs(before), 1e-12)
    if loss <= promise.bound:
        return ""
    return f"{promise.metric} is {after:.4g} instead of {before:.4g}, promised: {promise.text}"


def _weights(trial: Trial) -> list[float]:
    return [number(row.get("supervised_tokens")) or 0.0 for row in trial.rows]


def _tail(trial: Trial, metric: str, *, until: float) -> float:
    """Return the weighted mean of a metric over the last third of the first `until` supervised tokens."""
    total, seen, used = 0.0, 0.0, 0.0
    for weight, value in zip(_weights(trial), trial.values(metric), strict=True):
        seen += weight
        if seen > until * (1 + 1e-9):
            break
        if seen >= until * 2 / 3 and not math.isnan(value):
            total, used = total + weight * value, used + weight
    return total / used if used else math.nan


def _difference(one: Trial, other: Trial) -> float:
    """Return the largest relative difference of two trials' losses; infinity if they cannot be compared."""
    a, b = one.values("loss"), other.values("loss")
    if len(a) != len(b):
        return math.inf
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if not (math.isnan(x) and math.isnan(y))]
    found = [abs(x - y) / max(abs(x), 1e-12) if x != y else 0.0 for x, y in pairs]
    return max((math.inf if math.isnan(value) else value for value in found), default=0.0)


def _weigh(comparison: Comparison, *, gain: Gain, goal: Goal) -> Verdict:
    speed, memory, spread = comparison.speed, comparison.memory, comparison.spread
    noise = max(SMALLEST_GAIN, spread)
    said = f"speed x {speed:.2f}, memory x {memory:.2f}"
    unsteady = ""
    if comparison.time_spread > UNSTEADY:
        unsteady = f"; trials of the same options differ by {comparison.time_spread:.0%}: something else uses this machine"
    if comparison.by_cpu_time:
        unsteady += f", so CPU time was compared; it differs by {spread:.0%}"
    faster, slower = speed > 1 + noise, speed < 1 - noise
    smaller, larger = memory < 1 - SMALLEST_SAVING, memory > 1 + SMALLEST_SAVING
    if gain == "safety":
        kept = not slower and not larger
    elif goal == "speed":
        kept = faster or (smaller and not slower)
    else:
        kept = smaller or (faster and not larger)
    return Verdict(kept, said + unsteady)


def _ratio(new: Sequence[float], base: Sequence[float]) -> float:
    over = median(base)
    return median(new) / over if over and not math.isnan(over) else math.nan


@dataclass(frozen=True)
class Criterion:
    """A criterion, the measurement, and whether it is met."""

    what: str
    measured: str
    met: Answer


def check_criteria(ends: Comparison | None, validation: Trial, *, validated: Path) -> list[Criterion]:
    """Measure the criteria of the optimization guide."""
    return [
        *_gains(ends),
        _finite(ends, validation),
        _falling(validation),
        _processes(validation, validated),
        _checkpoints(validation, validated),
    ]


def _gains(ends: Comparison | None) -> list[Criterion]:
    faster, smaller = (
        f"speed at least {SPEED_WANTED:.0%} higher",
        f"memory at least {MEMORY_WANTED:.0%} lower",
    )
    if ends is None or ends.failed is not None:
        measured = "nothing was kept" if ends is None else "failed"
        return [Criterion(what, measured, "no") for what in (faster, smaller)]
    is_sure = ends.spread < abs(ends.speed - 1 - SPEED_WANTED)
    by = " by CPU time" if ends.by_cpu_time else ""
    speed = f"{_change(ends.speed)}{by} (trials differ by {ends.spread:.0%})"
    return [
        Criterion(faster, speed, _answer(ends.speed >= 1 + SPEED_WANTED) if is_sure else "cannot say"),
        Criterion(smaller, _change(ends.memory), _answer(ends.memory <= 1 - MEMORY_WANTED)),
    ]


def _answer(is_met: bool) -> Answer:
    return "yes" if is_met else "no"


def _change(ratio: float) -> str:
    if math.isnan(ratio):
        return "unknown"
    return f"{ratio - 1:+.0%}" if round(100 * (ratio - 1)) else "no change"


def _finite(ends: Comparison | None, validation: Trial) -> Criterion:
    """Count non-finite steps in all trials with the final options."""
    trials = [*(ends.new if ends else ()), validation]
    steps, bad = sum(len(trial.rows) for trial in trials), sum(trial.num_nonfinite for trial in trials)
    what = f"all gradients finite in {FINITE_STEPS_WANTED:,} steps"
    if bad or steps >= FINITE_STEPS_WANTED:
        return Criterion(what, f"{bad} in {steps:,} steps", _answer(not bad))
    return Criterion(what, f"0 in {steps:,} steps, too few to say", "cannot say")


def _falling(validation: Trial) -> Criterion:
    what, losses = "loss falling", [value for value in validation.values("loss") if not math.isnan(value)]
    fifth = len(losses) // 5
    if not fifth:
        return Criterion(what, f"{len(losses)} steps are too few to say", "cannot say")
    first, last = median(losses[:fifth]), median(losses[-fifth:])
    return Criterion(what, f"{first:.4f} -> {last:.4f}", _answer(last < first))


def _processes(validation: Trial, validated: Path) -> Criterion:
    what = "several processes work"
    if not validation.finished:
        return Criterion(what, validation.error, "cannot say")
    world = read_object(validated / "plan.json").get("world_size")
    if isinstance(world, int) and world > 1:
        return Criterion(what, f"{world} processes trained", "yes")
    return Criterion(what, "not tried: the options use one process; see --world_size", "cannot say")


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
