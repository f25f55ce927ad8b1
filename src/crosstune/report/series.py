"""Extract values over steps, smooth and downsample them, and find the best evaluation and overfitting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from crosstune.core.events import Evaluated, StepMetrics
from crosstune.loop.progress import WORSE, best_step
from crosstune.report.files import RunFiles, mapping, number
from crosstune.report.formatting import page_metrics

Point = tuple[float, float | None]
"""A step and its value; None for a non-finite value."""

NUM_BUCKETS = 120
SMOOTHED_SHARE = 20
"""The smoothing window is this fraction of the points: 1 / 20."""
MIN_TO_SMOOTH = 12
GAP = 0.1
"""Overfitting is likely where the training loss is below the evaluation loss by more than this fraction of it."""


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best evaluation of a run."""

    step: float
    loss: float
    is_last: bool
    """True if it is the last evaluation."""
    overfits: bool
    """True if the last evaluation is clearly worse."""
    last_loss: float


@dataclass(frozen=True, kw_only=True)
class Overfitting:
    """The first evaluation of likely overfitting, and the losses at the last one."""

    step: float
    train: float
    """The smoothed training loss at the last evaluation."""
    evaluation: float


def step_points(rows: Sequence[Mapping[str, Any]], key: str) -> list[Point]:
    """Return the values of one key, without rows that lack it; a null value is a gap."""
    return [(float(row["step"]), number(row[key])) for row in rows if key in row]


def final_loss(run: RunFiles) -> float | None:
    """Return the training loss of the last step; every page and table uses this figure."""
    points = step_points(run.metrics, "loss")
    return points[-1][1] if points else number(run.summary.get("final_loss"))


def running_total(run: RunFiles, key: str) -> list[tuple[float, float]]:
    """Return the sum of a metric up to each step. A row of a sample stands for the steps since the row before it."""
    found, total, before = list[tuple[float, float]](), 0.0, 0.0
    for step, value in step_points(run.metrics, key):
        total += (value or 0.0) * (step - before if run.is_sampled else 1)
        before = step
        found.append((step, total))
    return found


def smoothed_points(run: RunFiles, key: str, *, smoothing: float = 1.0) -> list[Point]:
    points = step_points(run.metrics, key)
    return smooth(points, window=smoothing_window(len(points), smoothing=smoothing))


def task_metrics(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the metrics for the page that a task adds to metrics.jsonl: floats, unlike the counts of a recipe."""
    added = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, float))
    new = added.keys() - StepMetrics.__annotations__.keys()
    return page_metrics({name: [row.get(name) for row in rows] for name in added if name in new})


def evaluation_points(run: RunFiles) -> dict[str, list[Point]]:
    """Return the evaluated metrics of the page over steps; the last value for a step that was evaluated twice."""
    found: dict[str, dict[float, float | None]] = {}
    for event in run.events_of(Evaluated):
        step = evaluation_step(event, run)
        for name, value in mapping(event.get("metrics")).items():
            found.setdefault(str(name), {})[step] = number(value)
    shown = page_metrics({name: values.values() for name, values in found.items()})
    return {name: sorted(found[name].items(), key=lambda point: point[0]) for name in shown}


def evaluation_step(event: Mapping[str, Any], run: RunFiles) -> float:
    step = number(event.get("step"))
    if step is not None:
        return step
    return float(run.last_step) if event.get("when") == "after" else 0.0


def evaluation_losses(run: RunFiles) -> list[Point]:
    """Return the evaluation losses over steps, from the summary if events.jsonl is missing."""
    found = evaluation_points(run).get("loss", [])
    if finite_values(found):
        return found
    kept = mapping(run.summary.get("evaluations"))
    points: list[Point] = [(float(step), number(loss)) for step, loss in kept.items() if step.isdecimal()]
    return sorted(points, key=lambda point: point[0])


def best_evaluation(run: RunFiles) -> Best | None:
    """Return the lowest evaluation loss after step 0; None if there is none."""
    losses = {int(step): loss for step, loss in evaluation_losses(run) if step and loss is not None}
    step = best_step(losses)
    if step is None:
        return None
    last, lowest = max(losses), losses[step]
    return Best(
        step=step,
        loss=lowest,
        is_last=step == last,
        overfits=losses[last] > (WORSE * lowest if lowest > 0 else lowest),
        last_loss=losses[last],
    )


def overfitting(run: RunFiles) -> Overfitting | None:
    """Return the evaluation after which the training loss stays clearly below the evaluation loss; None if there is none."""
    smoothed = dict(smoothed_points(run, "loss"))
    found: Overfitting | None = None
    for step, loss in evaluation_losses(run):
        before = [at for at in smoothed if at <= step]
        level = smoothed[max(before)] if before else None
        if loss is None or level is None or not step:
            continue
        if loss <= 0 or loss - level <= GAP * loss:
            found = None
        else:
            found = Overfitting(step=found.step if found else step, train=level, evaluation=loss)
    return found


def finite_values(points: Sequence[Point]) -> list[float]:
    return [value for _, value in points if value is not None]


def smoothing_window(num_points: int, *, smoothing: float = 1.0) -> int:
    """Return an odd number of points to average over, `smoothing` times as many as usual; 1 without smoothing or when there
    are too few points."""
    if num_points < MIN_TO_SMOOTH or smoothing <= 0:
        return 1
    return max(5, int(smoothing * num_points) // SMOOTHED_SHARE) | 1


def smooth(points: Sequence[Point], *, window: int) -> list[Point]:
    """Return the centered moving mean. Gaps stay gaps."""
    half = window // 2
    values = [value for _, value in points]
    sums = [0.0, *accumulate(value or 0.0 for value in values)]
    counts = [0, *accumulate(int(value is not None) for value in values)]
    smoothed: list[Point] = []
    for index, (step, value) in enumerate(points):
        start, stop = max(0, index - half), min(len(points), index + half + 1)
        count = counts[stop] - counts[start]
        smoothed.append((step, None if value is None else (sums[stop] - sums[start]) / count))
    return smoothed


def kept_indices(points: Sequence[Point], *, num_buckets: int = NUM_BUCKETS) -> list[int]:
    """Return the indices to draw: the first, the last, and per bucket the lowest, the highest and one gap."""
    if len(points) <= 3 * num_buckets:
        return list(range(len(points)))
    keep = {0, len(points) - 1}
    for bucket in range(num_buckets):
        within = range(bucket * len(points) // num_buckets, (bucket + 1) * len(points) // num_buckets)
        known = [(value, index) for index in within if (value := points[index][1]) is not None]
        keep |= {min(known)[1], max(known)[1]} if known else set()
        keep |= set([index for index in within if points[index][1] is None][:1])
    return sorted(keep)
