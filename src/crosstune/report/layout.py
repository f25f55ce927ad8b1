"""Lay out a chart: axes with round ticks, and all positions in percent of the plot."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from crosstune.report.charts import Chart, Series
from crosstune.report.formatting import NOT_FINITE, short_exponent, signed
from crosstune.report.series import NUM_BUCKETS, Point, finite_values, kept_indices

FEW_POINTS = 12
"""Maximum number of points of a curve that are also drawn as dots."""
MAX_LOG_TICKS = 8


@dataclass(frozen=True, kw_only=True)
class Axis:
    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def fraction(self, value: float) -> float:
        """Return the position of a value: 0 at the low end, 1 at the high end."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def labels(self) -> list[str]:
        if self.is_log:
            return [tick_label(tick, gap=tick) for tick in self.ticks]
        gaps = (after - tick for tick, after in zip(self.ticks, self.ticks[1:], strict=False))
        gap = min(gaps, default=self.high - self.low)
        return [tick_label(tick, gap=gap) for tick in self.ticks]


def value_axis(values: Sequence[float], *, from_zero: bool, num_ticks: int = 5) -> Axis:
    """Return an axis that covers all values and ends on round numbers."""
    low, high = min(values), max(values)
    # Start at zero when the values vary by more than a factor of two; otherwise zoom in on their range.
    if from_zero or 0 < low < high / 2:
        low, high = min(0.0, low), max(0.0, high)
    if high - low <= max(abs(low), abs(high), 1e-290) * 1e-9:
        margin = abs(high) / 10 or 1.0
        low, high = low - margin * (not from_zero), high + margin
    step = _round_step((high - low) / num_ticks)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(low=first * step, high=last * step, ticks=tuple(i * step for i in range(first, last + 1)))


def log_axis(values: Sequence[float]) -> Axis:
    """Return a logarithmic axis over positive values, with ticks at 1, 2 and 5 times powers of ten."""
    low, high = min(values), max(values)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    round_values = [_scaled(size, power) for power in powers for size in (1.0, 2.0, 5.0)]
    first = max(tick for tick in round_values if tick <= low * (1 + 1e-9))
    last = min(tick for tick in round_values if tick >= high * (1 - 1e-9))
    ticks = [tick for tick in round_values if first <= tick <= last]
    while len(ticks) > MAX_LOG_TICKS:
        ticks = ticks[::3] if len(ticks) > 3 * MAX_LOG_TICKS else ticks[::2]
    return Axis(low=first, high=last, ticks=tuple(ticks), is_log=True)


def step_axis(low: float, high: float, *, num_ticks: int = 6) -> Axis:
    """Return an axis over exactly this range, with ticks at whole numbers."""
    if high <= low:
        low, high = low - 1, high + 1
    step = max(1.0, _round_step((high - low) / num_ticks))
    step = 2.0 if step == 2.5 else step
    ticks = range(math.ceil(low / step), math.floor(high / step) + 1)
    return Axis(low=low, high=high, ticks=tuple(i * step for i in ticks))


def _round_step(rough: float) -> float:
    """Round up to 1, 2, 2.5 or 5 times a power of ten."""
    power = math.floor(math.log10(rough))
    steps = (_scaled(size, power) for size in (1.0, 2.0, 2.5, 5.0, 10.0))
    return next(step for step in steps if step >= rough * (1 - 1e-9))


def _scaled(size: float, power: int) -> float:
    # Divide for negative powers: 3 / 10 is the double nearest to 0.3, 3 * 0.1 is not.
    return size * 10.0**power if power >= 0 else size / 10.0**-power


def tick_label(value: float, *, gap: float) -> str:
    """Format a tick with only as many decimals as distinguish it from its neighbors."""
    if abs(value) < gap / 1000:
        return "0"
    # Small steps between large values read better without exponents.
    if gap >= 1e9 or abs(value) >= 1e15 or gap < 1e-6 or (gap < 1e-3 and abs(value) <= 50 * gap):
        digits = max(0, math.floor(math.log10(abs(value))) - math.floor(math.log10(gap)) + 1)
        text = short_exponent(f"{value:.{digits}e}")
    else:
        suffix, divisor = next(((s, d) for s, d in (("M", 1e6), ("k", 1e3)) if gap >= d), ("", 1.0))
        gap /= divisor
        places = next((n for n in range(6) if math.isclose(round(gap, n), gap, rel_tol=1e-6)), 6)
        text = f"{value / divisor:,.{places}f}{suffix}"
    return signed(text)


def layout(chart: Chart) -> dict[str, Any]:
    """Return the positions of the chart's parts in percent of the plot, for `chart.svg.jinja`."""
    down, across = _axes(chart)
    drawn = _thinned([series for series in chart.series if finite_values(series.points)])

    def x(at: float) -> float:
        return 100 * across.fraction(at)

    def y(value: float) -> float:
        return 100 * (1 - down.fraction(value / chart.divisor))

    is_square = chart.shape == "square"
    x_labels = across.labels() if is_square else [f"{tick:,.0f}" for tick in across.ticks]
    curves = [each for each in drawn if each.look != "bars"]
    lines = [each for each in curves if each.look != "scatter"]
    return {
        "label": chart.description or describe(chart),
        "readout": _readout(chart, drawn, across, y) if len(lines) == len(drawn) else "",
        "down": [
            (100 * (1 - down.fraction(tick)), label)
            for tick, label in zip(down.ticks, down.labels(), strict=True)
        ],
        "across": [(x(tick), label) for tick, label in zip(across.ticks, x_labels, strict=True)],
        "marks": [(x(mark.at), mark) for mark in chart.marks],
        "curves": [
            (each, _path([(x(at), None if v is None else y(v)) for at, v in each.points])) for each in lines
        ],
        "dots": [(each, [(x(at), y(v), r) for at, v, r in _dots(each)]) for each in curves],
        "bars": [(each, _bars(each, chart, across, y)) for each in drawn if each.look == "bars"],
    }


def chart_data(chart: Chart, *, num_buckets: int) -> dict[str, Any]:
    """Return a chart with downsampled curves for a page that draws it with a script. Values are in the units of the axis."""
    drawn = _thinned([each for each in chart.series if finite_values(each.points)], num_buckets=num_buckets)
    return {
        "title": chart.title,
        "unit": chart.unit,
        "divisor": chart.divisor,
        "from_zero": chart.from_zero,
        "x_label": chart.x_label,
        "span": chart.span,
        "wide": chart.shape == "wide",
        "has_log": chart.logarithmic is not None,
        "description": describe(chart),
        "figures": [(name, shown.text) for name, shown in chart.figures] if chart.shows_figures else [],
        "notes": list(chart.notes),
        "marks": [{"at": mark.at, "label": mark.label, "look": mark.look} for mark in chart.marks],
        "series": [
            {
                "label": each.label,
                "look": each.look,
                "color": each.color,
                "key": each.key,
                "x": [at for at, _ in each.points],
                "y": [None if value is None else _short(value / chart.divisor) for _, value in each.points],
            }
            for each in drawn
        ],
        "others": [chart_data(each, num_buckets=num_buckets) for each in chart.other_axes],
    }


def _short(value: float) -> float:
    """Round to the digits that a chart can show."""
    return float(f"{value:.7g}")


def describe(chart: Chart) -> str:
    """Return the chart's text alternative for screen readers."""
    first, last = chart.x_range
    span = f"at {chart.x_label} {first:,.0f}"
    if first != last:
        span = f"from {chart.x_label} {first:,.0f} to {last:,.0f}"
    numbers = ", ".join(f"{name} {shown.text}" for name, shown in chart.figures)
    gaps = f"; {chart.num_gaps} steps without a finite value" if chart.num_gaps else ""
    gaps += "".join(f"; {mark.label} at {chart.x_label} {mark.at:,.0f}" for mark in chart.marks)
    unit = f" in {chart.unit}" if chart.unit else ""
    return f"{chart.title}{unit} {span}: {numbers or 'no finite value'}{gaps}."


def _axes(chart: Chart) -> tuple[Axis, Axis]:
    """Return the axes of the values and of the steps. A square chart has the same axis twice."""
    values = [value / chart.divisor for value in chart.values]
    if chart.shape == "square":
        values += [at for series in chart.series for at, _ in series.points]
        both = value_axis([*values, *(chart.span or ())], from_zero=chart.from_zero)
        return both, both
    down = log_axis(values) if chart.is_log else value_axis(values, from_zero=chart.from_zero)
    return down, step_axis(*(chart.span or chart.x_range))


def _thinned(series: Sequence[Series], *, num_buckets: int = NUM_BUCKETS) -> list[Series]:
    """Downsample every curve; curves over the same steps keep the same steps, so that they are read out together."""
    steps = [step for step, _ in series[0].points]
    shared = kept_indices(series[0].points, num_buckets=num_buckets)
    drawn = []
    for each in series:
        if each.look in ("bars", "scatter"):
            drawn.append(each)
            continue
        same = [step for step, _ in each.points] == steps
        indices = shared if same else kept_indices(each.points, num_buckets=num_buckets)
        drawn.append(replace(each, points=[each.points[index] for index in indices]))
    return drawn


def _path(points: Sequence[Point]) -> str:
    """Return the SVG path through points in percent, interrupted at every gap."""
    commands: list[str] = []
    pen_down = False
    for x, y in points:
        if y is not None:
            commands.append(f"{'L' if pen_down else 'M'}{10 * x:.1f} {10 * y:.1f}")
        pen_down = y is not None
    return "".join(commands)


def _dots(series: Series) -> list[tuple[float, float, float]]:
    """Return position, value and radius of the dots: for few points all of them, otherwise only points between two gaps."""
    dot_every_point = series.look in ("marked", "scatter") or len(series.points) <= FEW_POINTS
    values = [None, *(value for _, value in series.points), None]
    radii = series.radii or [3.0] * len(series.points)
    return [
        (at, value, radii[place])
        for place, (at, value) in enumerate(series.points)
        if value is not None and (dot_every_point or values[place] is None is values[place + 2])
    ]


def _bars(
    series: Series, chart: Chart, across: Axis, y: Callable[[float], float]
) -> list[tuple[float, float, float, str]]:
    """Return left end, top, width and title of each bar; each point is the left end of a bin and its count."""
    width = (across.high - across.low) / len(series.points)
    bars = []
    for left, count in series.points:
        shown = chart.show(count or 0.0).text
        title = f"{left:,.0f} to {left + width - 1:,.0f} {chart.x_label}: {shown} {series.label}"
        x = 100 * across.fraction(left + 0.1 * width)
        bars.append((x, y(count or 0.0), 80 / len(series.points), title))
    return bars


def _readout(chart: Chart, drawn: Sequence[Series], across: Axis, y: Callable[[float], float]) -> str:
    """Return the values for the page's script as JSON: step, height in the plot, text."""
    series = [
        {
            "label": each.label,
            "color": each.color,
            "points": [
                [step, None, NOT_FINITE]
                if value is None
                else [step, round(y(value) / 100, 4), chart.show(value).text]
                for step, value in each.points
            ],
        }
        for each in drawn
    ]
    found = {"x": chart.x_label, "steps": [across.low, across.high], "series": series}
    return json.dumps(found, ensure_ascii=False, separators=(",", ":"))
