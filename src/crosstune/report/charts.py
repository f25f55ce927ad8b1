"""Build the charts of runs as data: series of points, marks, and the format of values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from crosstune.core.events import Loaded, Resumed
from crosstune.report.files import RunFiles, listed, mapping, number
from crosstune.report.formatting import (
    NOT_FINITE,
    FormattedValue,
    display_of,
    label_of,
    ordered,
    show_count,
    show_number,
)
from crosstune.report.series import (
    Point,
    best_evaluation,
    evaluation_losses,
    evaluation_points,
    finite_values,
    overfitting,
    running_total,
    smooth,
    smoothed_points,
    smoothing_window,
    step_points,
    task_metrics,
)

MIN_LOG_RATIO = 3.0
"""Smallest ratio of highest to lowest value for which a logarithmic axis is offered."""
NUM_COLORS = 7
MAX_BINS = 200
_STEP_CHARTS = (
    ("Learning rate", "lr", False),
    ("Throughput", "tokens_per_s", True),
    ("Memory", "memory_bytes", False),
    ("Gradient norm", "grad_norm", True),
)
"""Title, key in metrics.jsonl, and whether the curve is smoothed."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve. `color` is an index into the palette of the page; `look` distinguishes curves without color."""

    label: str
    points: Sequence[Point]
    look: Literal["line", "faint", "marked", "scatter", "bars"] = "line"
    color: int = 1
    radii: Sequence[float] = ()
    """The size of each point of a scatter plot."""
    key: str = ""
    """Key in metrics.jsonl of a curve with the value of each step; empty for other curves."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A vertical line for an event; `overfit` also shades the region after it."""

    at: float
    label: str
    look: Literal["move", "best", "overfit"] = "move"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart of one or more series over steps, tokens or milliseconds."""

    title: str
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    unit: str = ""
    divisor: float = 1.0
    """The axis shows the values divided by this."""
    show: Callable[[float], FormattedValue] = show_number
    """Format of a value under the pointer."""
    x_label: str = "step"
    y_label: str = ""
    span: tuple[float, float] | None = None
    """The range of the x-axis; None for the range of the points."""
    from_zero: bool = False
    is_log: bool = False
    shape: Literal["small", "wide", "square", "single"] = "small"
    notes: Sequence[str] = ()
    """Sentences below the chart."""
    description: str = ""
    """Text alternative; derived from the values if empty."""
    other_axes: Sequence[Chart] = ()
    """The same chart over tokens and over time."""
    shows_figures: bool = True
    """Show the last, lowest and highest value of the first series next to the title."""

    @property
    def logarithmic(self) -> Chart | None:
        """The same chart with a logarithmic axis; None if the range of values is too small."""
        low, high = min(self.values, default=0.0), max(self.values, default=0.0)
        is_useful = self.shape == "wide" and 0 < low <= high / MIN_LOG_RATIO
        return replace(self, is_log=True) if is_useful else None

    @property
    def views(self) -> list[tuple[str, Chart]]:
        """The chart and its alternative views, each with the label of its switch."""
        log = [("log scale", self.logarithmic)] if self.logarithmic else []
        return [(self.x_label, self), *((each.x_label, each) for each in self.other_axes), *log]

    @property
    def values(self) -> list[float]:
        return [value for series in self.series for value in finite_values(series.points)]

    @property
    def x_range(self) -> tuple[float, float]:
        places = [at for series in self.series for at, _ in series.points]
        return min(places), max(places)

    @property
    def num_gaps(self) -> int:
        """The number of non-finite values of the first series."""
        return sum(value is None for _, value in self.series[0].points)

    @property
    def figures(self) -> list[tuple[str, FormattedValue]]:
        """The last, lowest and highest value of the first series."""
        points = self.series[0].points
        values = finite_values(points)
        if not values:
            return []
        if len(points) == 1:
            return [("only value", self.show(values[0]))]
        last = points[-1][1]
        found = [("last", FormattedValue(NOT_FINITE) if last is None else self.show(last))]
        found += [("lowest", self.show(min(values))), ("highest", self.show(max(values)))]
        # The title already shows the unit; a small value in another unit keeps it.
        return [
            (name, shown._replace(text=shown.text.removesuffix(self.unit).rstrip())) for name, shown in found
        ]


def run_charts(run: RunFiles, *, smoothing: float = 1.0) -> list[Chart]:
    """Return the charts of a run over the same range of steps; some may have no finite value."""
    evaluated = evaluation_points(run)
    steps = [step for points in evaluated.values() for step, _ in points]
    span = (0.0, max([*steps, float(run.last_step)]))
    charts = [_loss_chart(run, smoothing)]
    trained = task_metrics(run.metrics)
    both = [name for name in trained if name in evaluated]
    charts += _paired_charts(run, ordered(both), evaluated, smoothing)
    for name in ordered(evaluated):
        if name != "loss" and name not in both:
            series = [Series(label=label_of(name), points=evaluated[name], look="marked", color=2)]
            charts.append(_metric_chart("Evaluation: ", name, series))
    for name in trained:
        if name in both:
            continue
        charts.append(_metric_chart("Training: ", name, _with_smoothed(run, name, smoothing)))
    for title, name, smoothed in _STEP_CHARTS:
        plain = [Series(label=title.lower(), points=step_points(run.metrics, name), color=3, key=name)]
        charts.append(_metric_chart(title, name, _with_smoothed(run, name, smoothing) if smoothed else plain))
    moves = run_moves(run)
    charts = [replace(chart, span=span, marks=[*moves, *chart.marks]) for chart in charts]
    owners = [run] * len(charts[0].series)
    return [replace(charts[0], other_axes=_over_other_axes(charts[0], owners)), *charts[1:]]


def _paired_charts(
    run: RunFiles, names: Sequence[str], evaluated: Mapping[str, Sequence[Point]], smoothing: float
) -> list[Chart]:
    """Return charts of metrics measured in training and on held-out data; the chosen and the rejected side of a group such
    as `rewards/chosen` share a chart."""
    charts = []
    for name in names:
        group, _, side = name.partition("/")
        other = f"{group}/rejected"
        if side == "rejected" and f"{group}/chosen" in names:
            continue
        drawn = [name, other] if side == "chosen" and other in names else [name]
        series = list[Series]()
        for place, each in enumerate(drawn):
            before = f"{each.partition('/')[2]}, " if len(drawn) > 1 else ""
            points = smoothed_points(run, each, smoothing=smoothing)
            series.append(Series(label=f"{before}training", points=points, color=1 + 2 * place))
            series.append(
                Series(label=f"{before}held-out", points=evaluated[each], look="marked", color=2 + 2 * place)
            )
        label = label_of(name)
        title = (
            f"{group.capitalize()}: chosen and rejected" if len(drawn) > 1 else label[:1].upper() + label[1:]
        )
        charts.append(replace(_metric_chart(title, name, series), shows_figures=len(drawn) == 1))
    return charts


def _over_other_axes(chart: Chart, owners: Sequence[RunFiles]) -> list[Chart]:
    """Return the chart over trained tokens and over training time; omit evaluations between logged steps. `owners` has the
    run of each series; the marks are of the first."""
    seconds = [{0.0: 0.0} | dict(running_total(run, "step_s")) for run in owners]
    total = max((max(each.values()) for each in seconds), default=0.0)
    unit, size = next(
        each
        for each in (("seconds", 1), ("minutes", 60), ("hours", 3600))
        if total < 300 * each[1] or each[1] == 3600
    )
    times = [{step: round(at / size, 3) for step, at in each.items()} for each in seconds]
    tokens = [{0.0: 0.0} | dict(running_total(run, "tokens")) for run in owners]
    found = []
    for label, places in (("tokens", tokens), (unit, times)):
        last = max((max(each.values()) for each in places), default=0.0)
        if last >= 1:  # the axis shows whole numbers
            series = [
                replace(each, points=[(at[step], value) for step, value in each.points if step in at], key="")
                for each, at in zip(chart.series, places, strict=True)
            ]
            marks = [replace(mark, at=places[0][mark.at]) for mark in chart.marks if mark.at in places[0]]
            found.append(replace(chart, x_label=label, series=series, marks=marks, span=(0.0, last)))
    return found


def run_moves(run: RunFiles) -> list[Mark]:
    """Return a mark for each step at which the run was resumed, with the change of backend, if any."""
    found, backend = dict[float, Mark](), ""
    for event in run.events:
        if event.get("kind") == Loaded.kind:
            backend = str(event.get("backend", ""))
        step, before = number(event.get("step")), event.get("backend")
        if event.get("kind") == Resumed.kind and step is not None:
            moved = before and backend not in ("", before)
            found[step] = Mark(at=step, label=f"{before} → {backend}" if moved else "resumed")
    return list(found.values())


def _with_smoothed(run: RunFiles, name: str, smoothing: float) -> list[Series]:
    points = step_points(run.metrics, name)
    window = smoothing_window(len(points), smoothing=smoothing)
    if window == 1:
        return [Series(label="each step", points=points, key=name)]
    label = "smoothed" if run.is_sampled else f"mean of {window} steps"
    return [
        Series(label="each step", points=points, look="faint", key=name),
        Series(label=label, points=smooth(points, window=window)),
    ]


def _metric_chart(title: str, name: str, series: Sequence[Series], **more: Any) -> Chart:
    """Return a chart in the format of a metric. A title that ends in a space is followed by the metric's label."""
    display = display_of(name, [value for each in series for value in finite_values(each.points)])
    return Chart(
        title=f"{title}{display.label}" if title.endswith(" ") else title,
        series=series,
        unit=display.unit,
        divisor=display.divisor,
        show=display.show,
        from_zero=display.from_zero,
        **more,
    )


def _loss_chart(run: RunFiles, smoothing: float) -> Chart:
    series = _with_smoothed(run, "loss", smoothing)
    if evaluated := evaluation_losses(run):
        series.append(Series(label="evaluation", points=evaluated, look="marked", color=2))
    marks, notes = list[Mark](), list[str]()
    if (best := best_evaluation(run)) is not None:
        lowest = show_number(best.loss).text
        marks.append(Mark(at=best.step, label=f"best evaluation {lowest}", look="best"))
        later = f"; the last one is {show_number(best.last_loss).text}" if not best.is_last else ""
        notes.append(f"Best evaluation: {lowest} at step {best.step:,.0f}{later}.")
    if (found := overfitting(run)) is not None:
        marks.append(Mark(at=found.step, label="likely overfitting", look="overfit"))
        low, high = show_number(found.train).text, show_number(found.evaluation).text
        notes.append(
            f"The shaded region marks likely overfitting, from step {found.step:,.0f}: at the last evaluation the "
            f"training loss is {low} and the evaluation loss {high}."
        )
    return Chart(title="Loss", series=series, shape="wide", marks=marks, notes=notes)


def overlay_charts(runs: Sequence[RunFiles], names: Sequence[str], *, smoothing: float = 1.0) -> list[Chart]:
    """Return charts with a curve for each run, without charts that have no finite value."""
    span = (0.0, max(float(run.last_step) for run in runs))
    evaluated = [evaluation_points(run) for run in runs]

    def overlay(title: str, name: str, points: Sequence[Sequence[Point]], **more: Any) -> Chart:
        marked = title.startswith("Evaluation")
        drawn = [(place, run) for place, run in enumerate(runs) if finite_values(points[place])]
        series = [
            Series(
                label=names[place],
                points=points[place],
                color=1 + place % NUM_COLORS,
                look="marked" if marked or place >= NUM_COLORS else "line",
            )
            for place, _ in drawn
        ]
        chart = _metric_chart(title, name, series, span=span, shows_figures=False, **more)
        owners = [run for _, run in drawn]
        return replace(chart, other_axes=_over_other_axes(chart, owners)) if owners and more else chart

    losses = [smoothed_points(run, "loss", smoothing=smoothing) for run in runs]
    charts = [
        overlay("Training loss, smoothed", "loss", losses, shape="wide"),
        overlay("Evaluation loss", "loss", [evaluation_losses(run) for run in runs], shape="wide"),
    ]
    for name in ordered(dict.fromkeys(name for points in evaluated for name in points if name != "loss")):
        charts.append(overlay("Evaluation: ", name, [points.get(name, []) for points in evaluated]))
    speeds = [smoothed_points(run, "tokens_per_s", smoothing=smoothing) for run in runs]
    memory = [step_points(run.metrics, "memory_bytes") for run in runs]
    charts += [
        overlay("Throughput, smoothed", "tokens_per_s", speeds),
        overlay("Memory", "memory_bytes", memory),
    ]
    return [chart for chart in charts if chart.values]


def length_chart(data: Mapping[str, Any]) -> Chart | None:
    """Return a histogram of the examples' lengths in tokens; None if they are not recorded."""
    found = mapping(data.get("lengths"))
    first, width = number(found.get("first")), number(found.get("width"))
    counts = [number(count) for count in listed(found.get("counts"))][:MAX_BINS]
    known = [count for count in counts if count is not None and count >= 0]
    if first is None or not width or width < 0 or not known or len(known) != len(counts):
        return None
    points = [(first + width * place, count) for place, count in enumerate(known)]
    high = first + width * len(known)
    most = max(points, key=lambda point: point[1])[0]
    context = number(data.get("context_length"))
    marks = list[Mark]()
    if context is not None and first < context <= high:
        marks.append(Mark(at=context, label=f"context {context:,.0f}"))
    return Chart(
        title="Example lengths",
        unit="tokens",
        series=[Series(label="examples", points=points, look="bars")],
        marks=marks,
        show=show_count,
        x_label="tokens",
        shape="single",
        span=(first, high),
        from_zero=True,
        shows_figures=False,
        description=(
            f"Lengths of {show_count(sum(known)).text} examples, from {first:,.0f} to {high:,.0f} tokens; "
            f"most have {most:,.0f} to {most + width - 1:,.0f}."
        ),
    )


def memory_chart(timeline: Any) -> Chart | None:
    """Return the allocated bytes over the milliseconds of a profile; None with fewer than two points."""
    pairs = [(number(pair[0]), number(pair[1])) for pair in map(listed, listed(timeline)) if len(pair) == 2]
    points = [(1000 * at, size) for at, size in pairs if at is not None and size is not None]
    if len(points) < 2:
        return None
    series = [Series(label="allocated", points=points, color=3)]
    return _metric_chart("Allocated memory", "memory_bytes", series, x_label="ms", shape="single")
