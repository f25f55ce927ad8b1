"""Build the charts of a run from its metrics and evaluations."""

from __future__ import annotations

from dataclasses import dataclass, replace

from crosstune.core.events import Loaded, Resumed
from crosstune.report.chart import Chart, Mark, Scale, Series, byte_scale
from crosstune.report.files import RunFiles, number
from crosstune.report.metric import display_of, ordered
from crosstune.report.quantity import show_bytes, show_number, show_rate, show_setting
from crosstune.report.series import (
    Point,
    evaluation_points,
    finite_values,
    smooth,
    smoothing_window,
    step_points,
    task_metrics,
)
from crosstune.report.turning_points import best_evaluation, evaluation_losses, parting


@dataclass(frozen=True, kw_only=True)
class RunCharts:
    charts: list[Chart]
    absent: list[str]
    """Titles of the charts without any finite value."""


def run_charts(run: RunFiles) -> RunCharts:
    """Return all charts over the same range of steps, so that they line up on the page."""
    evaluated = evaluation_points(run)
    steps = _step_range(run, evaluated)
    loss = _loss_chart(run, evaluation_losses(run), steps)
    others = {name: points for name, points in evaluated.items() if name != "loss"}
    candidates = [loss, *_evaluation_charts(others, steps)]
    candidates += _task_charts(run, steps)
    candidates += [_learning_rate_chart(run, steps), _throughput_chart(run, steps)]
    candidates += [_memory_chart(run, steps), _gradient_chart(run, steps)]
    moves = run_moves(run)
    candidates = [replace(chart, marks=[*moves, *chart.marks]) for chart in candidates]
    return RunCharts(
        charts=[chart for chart in candidates if chart.values],
        absent=[chart.title for chart in candidates if not chart.values],
    )


def run_moves(run: RunFiles) -> list[Mark]:
    """Return a mark for each step at which the run was resumed on another backend."""
    found, backend = list[Mark](), ""
    for event in run.events:
        if event.get("kind") == Loaded.kind:
            backend = str(event.get("backend", ""))
        step, before = number(event.get("step")), event.get("backend")
        if event.get("kind") == Resumed.kind and step is not None and before and backend not in ("", before):
            found.append(Mark(step=step, label=f"{before} → {backend}"))
    return found


def _step_range(run: RunFiles, evaluated: dict[str, list[Point]]) -> tuple[float, float]:
    steps = [step for points in evaluated.values() for step, _ in points]
    return 0.0, max([*steps, float(run.last_step)], default=0.0)


def _with_smoothed(points: list[Point]) -> list[Series]:
    window = smoothing_window(len(points))
    if window == 1:
        return [Series(label="each step", points=points)]
    return [
        Series(label="each step", points=points, look="faint"),
        Series(label=f"mean of {window} steps", points=smooth(points, window=window)),
    ]


def _loss_chart(run: RunFiles, evaluated: list[Point], steps: tuple[float, float]) -> Chart:
    series = _with_smoothed(step_points(run.metrics, "loss"))
    if evaluated:
        series.append(Series(label="evaluation", points=evaluated, look="marked", colour=2))
    marks, notes = _turning_points(run)
    return Chart(title="Loss", series=series, steps=steps, wide=True, marks=marks, notes=notes)


def _turning_points(run: RunFiles) -> tuple[list[Mark], list[str]]:
    """Return the marks and sentences for the best evaluation, and for where training and evaluation part."""
    marks, notes = list[Mark](), list[str]()
    if (best := best_evaluation(run)) is not None:
        lowest = show_number(best.loss).text
        marks.append(Mark(step=best.step, label=f"best evaluation {lowest}", look="best"))
        later = f"; the last one is {show_number(best.last_loss).text}" if not best.is_last else ""
        notes.append(f"Best evaluation: {lowest} at step {best.step:,.0f}{later}.")
    if (parted := parting(run)) is not None:
        marks.append(Mark(step=parted.step, label="training and evaluation part", look="parting"))
        low, high = show_number(parted.train).text, show_number(parted.evaluation).text
        notes.append(
            f"Training and evaluation part at step {parted.step:,.0f}: at the last evaluation training is at {low} and "
            f"evaluation at {high}. What training gains from there on is partly learned by heart."
        )
    return marks, notes


def _evaluation_charts(evaluated: dict[str, list[Point]], steps: tuple[float, float]) -> list[Chart]:
    charts = []
    for name in ordered(evaluated):
        display = display_of(name, finite_values(evaluated[name]))
        series = [Series(label=display.label, points=evaluated[name], look="marked", colour=2)]
        scale = (
            Scale(unit="%", divisor=0.01, show=display.show) if display.is_share else Scale(show=display.show)
        )
        title = f"Evaluation: {display.label}"
        charts.append(Chart(title=title, series=series, scale=scale, steps=steps, from_zero=display.is_share))
    return charts


def _task_charts(run: RunFiles, steps: tuple[float, float]) -> list[Chart]:
    """Return a chart for each metric that the recipe's task computes in training."""
    charts = []
    for name in task_metrics(run.metrics):
        points = step_points(run.metrics, name)
        display = display_of(name, finite_values(points))
        scale = (
            Scale(unit="%", divisor=0.01, show=display.show) if display.is_share else Scale(show=display.show)
        )
        title, series = f"Training: {display.label}", _with_smoothed(points)
        charts.append(Chart(title=title, series=series, scale=scale, steps=steps, from_zero=display.is_share))
    return charts


def _learning_rate_chart(run: RunFiles, steps: tuple[float, float]) -> Chart:
    series = [Series(label="learning rate", points=step_points(run.metrics, "lr"), colour=3)]
    return Chart(
        title="Learning rate", series=series, scale=Scale(show=show_setting), steps=steps, from_zero=True
    )


def _throughput_chart(run: RunFiles, steps: tuple[float, float]) -> Chart:
    series = _with_smoothed(step_points(run.metrics, "tokens_per_s"))
    scale = Scale(unit="tok/s", show=show_rate)
    return Chart(title="Throughput", series=series, scale=scale, steps=steps, from_zero=True)


def _memory_chart(run: RunFiles, steps: tuple[float, float]) -> Chart:
    points = step_points(run.metrics, "memory_bytes")
    scale = byte_scale(finite_values(points), show=show_bytes)
    return Chart(
        title="Memory",
        series=[Series(label="memory", points=points, colour=3)],
        scale=scale,
        steps=steps,
        from_zero=True,
    )


def _gradient_chart(run: RunFiles, steps: tuple[float, float]) -> Chart:
    series = _with_smoothed(step_points(run.metrics, "grad_norm"))
    return Chart(title="Gradient norm", series=series, steps=steps, from_zero=True)
