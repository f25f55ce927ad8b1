"""Find the best evaluation of a run, and the step at which training and evaluation part."""

from __future__ import annotations

from dataclasses import dataclass

from crosstune.loop.best import WORSE, best_step
from crosstune.report.files import RunFiles, mapping, number
from crosstune.report.series import (
    Point,
    evaluation_points,
    finite_values,
    smooth,
    smoothing_window,
    step_points,
)

GAP = 0.1
"""Training and evaluation have parted where training is lower by more than this share of the evaluation loss."""


@dataclass(frozen=True, kw_only=True)
class Best:
    step: float
    loss: float
    is_last: bool
    """Whether no later evaluation exists."""
    overfits: bool
    """Whether the last evaluation is clearly worse."""
    last_loss: float


@dataclass(frozen=True, kw_only=True)
class Parting:
    step: float
    train: float
    """The smoothed training loss at the last evaluation."""
    evaluation: float


def best_evaluation(run: RunFiles) -> Best | None:
    """Return the lowest evaluation loss after at least one step; None without one."""
    points = [(step, loss) for step, loss in evaluation_losses(run) if step and loss is not None]
    step = best_step({int(step): loss for step, loss in points})
    if step is None:
        return None
    losses, last = {int(at): loss for at, loss in points}, points[-1]
    lowest = losses[step]
    return Best(
        step=step,
        loss=lowest,
        is_last=step == int(last[0]),
        overfits=last[1] > (WORSE * lowest if lowest > 0 else lowest),
        last_loss=last[1],
    )


def evaluation_losses(run: RunFiles) -> list[Point]:
    """Return the evaluation losses over steps; from the summary if the events are lost."""
    found = evaluation_points(run).get("loss", [])
    if finite_values(found):
        return found
    kept = mapping(run.summary.get("evaluations"))
    points: list[Point] = [(float(step), number(loss)) for step, loss in kept.items() if step.isdecimal()]
    return sorted(points, key=lambda point: point[0])


def parting(run: RunFiles) -> Parting | None:
    """Return the first evaluation from which on training stays clearly below it; None where both go together."""
    train = step_points(run.metrics, "loss")
    smoothed = dict(smooth(train, window=smoothing_window(len(train))))
    parted: Parting | None = None
    for step, loss in evaluation_losses(run):
        level = _at(smoothed, step)
        if loss is None or level is None or not step:
            continue
        if loss <= 0 or loss - level <= GAP * loss:
            parted = None
        else:
            first = parted.step if parted is not None else step
            parted = Parting(step=first, train=level, evaluation=loss)
    return parted


def _at(values: dict[float, float | None], step: float) -> float | None:
    if step in values:
        return values[step]
    before = [at for at in values if at <= step]
    return values[max(before)] if before else None
