"""Draw series of points as an inline SVG chart that fits any width."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from markupsafe import Markup

from crosstune.report.axis import LEAST_LOG_RATIO, Axis, log_axis, step_axis, value_axis
from crosstune.report.quantity import NOT_FINITE, Shown, byte_unit, show_number
from crosstune.report.series import Point, finite_values, kept_indices

PLOT_UNITS = 1000
"""Side of the square in which curves are drawn; it is stretched to the plot, and strokes keep their width."""
FEW_POINTS = 12
"""Up to this many points, each is also drawn as a dot."""

Look = Literal["line", "faint", "marked"]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve. `colour` is an index into the page's palette; `look` distinguishes curves without colour."""

    label: str
    points: Sequence[Point]
    look: Look = "line"
    colour: int = 1


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The format of values: divided by `divisor` for the axis, with `show` for the read-out."""

    unit: str = ""
    divisor: float = 1.0
    show: Callable[[float], Shown] = show_number


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A vertical line for something that happened after a step."""

    step: float
    label: str
    look: Literal["move", "best", "parting"] = "move"
    """`parting` also shades what follows."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    scale: Scale = Scale()
    from_zero: bool = False
    steps: tuple[float, float] | None = None
    """The range of steps, when several charts share one."""
    wide: bool = False
    is_log: bool = False
    notes: Sequence[str] = ()
    """Sentences below the chart."""
    shows_figures: bool = True
    """Whether the last, lowest and highest value of the first series stand beside the title."""

    @property
    def logarithmic(self) -> Chart | None:
        """The same chart over a logarithmic axis; None where it would show nothing more."""
        values = self.values
        if not self.wide or not values or min(values) <= 0 or max(values) < LEAST_LOG_RATIO * min(values):
            return None
        return replace(self, is_log=True)

    @property
    def values(self) -> list[float]:
        return [value for series in self.series for value in finite_values(series.points)]

    @property
    def num_gaps(self) -> int:
        """The number of steps of the first series whose value is not finite."""
        return sum(value is None for _, value in self.series[0].points)

    @property
    def figures(self) -> list[tuple[str, Shown]]:
        """The last, lowest and highest value of the first series."""
        values = finite_values(self.series[0].points)
        if not values:
            return []
        if len(self.series[0].points) == 1:
            return [("only value", self.scale.show(values[0]))]
        last = self.series[0].points[-1][1]
        shown_last = Shown(NOT_FINITE) if last is None else self.scale.show(last)
        found = [
            ("last", shown_last),
            ("lowest", self.scale.show(min(values))),
            ("highest", self.scale.show(max(values))),
        ]
        # The title already shows the unit; a value so small that it has another unit keeps its own.
        return [
            (name, shown._replace(text=shown.text.removesuffix(self.scale.unit).rstrip()))
            for name, shown in found
        ]


def byte_scale(values: Sequence[float], *, show: Callable[[float], Shown]) -> Scale:
    unit, divisor = byte_unit(max(values, default=0.0))
    return Scale(unit=unit, divisor=divisor, show=show)


def draw(chart: Chart) -> Markup:
    """Return the chart as an SVG element, empty when no value is finite.

    Everything but the curves is positioned in percent of the plot, so text keeps its size at any width.
    """
    if not chart.values:
        return Markup()
    scaled = [value / chart.scale.divisor for value in chart.values]
    down = log_axis(scaled) if chart.is_log else value_axis(scaled, from_zero=chart.from_zero)
    across = step_axis(*(chart.steps or _step_range(chart.series)))
    drawn = _thinned([series for series in chart.series if finite_values(series.points)])
    parts = [
        _grid(across, down),
        _marks(chart, across),
        *(_curve(series, across, down, chart.scale) for series in drawn),
        *(_dots(series, across, down, chart.scale) for series in drawn),
        Markup('<g class="guide" visibility="hidden"><line y1="0" y2="100%"/></g>'),
    ]
    return Markup('<svg class="plot" role="img" aria-label="{}" data-readout="{}">{}</svg>').format(
        describe(chart), _readout(drawn, across, down, chart.scale), Markup("").join(parts)
    )


def describe(chart: Chart) -> str:
    """Return the chart's text alternative for screen readers."""
    first, last = _step_range(chart.series)
    span = f"at step {first:,.0f}" if first == last else f"from step {first:,.0f} to {last:,.0f}"
    numbers = ", ".join(f"{name} {shown.text}" for name, shown in chart.figures)
    gaps = f"; {chart.num_gaps} steps without a finite value" if chart.num_gaps else ""
    gaps += "".join(f"; {mark.label} after step {mark.step:,.0f}" for mark in chart.marks)
    unit = f" in {chart.scale.unit}" if chart.scale.unit else ""
    return f"{chart.title}{unit} {span}: {numbers or 'nothing finite'}{gaps}."


def _step_range(series: Sequence[Series]) -> tuple[float, float]:
    steps = [step for each in series for step, _ in each.points]
    return min(steps), max(steps)


def _thinned(series: Sequence[Series]) -> list[Series]:
    """Downsample every curve; curves over the same steps keep the same points, so that read-outs line up."""
    steps = [step for step, _ in series[0].points]
    shared = kept_indices(series[0].points)
    drawn = []
    for each in series:
        same = [step for step, _ in each.points] == steps
        indices = shared if same else kept_indices(each.points)
        drawn.append(replace(each, points=[each.points[index] for index in indices]))
    return drawn


def _grid(across: Axis, down: Axis) -> Markup:
    lines = []
    for tick, label in zip(down.ticks, down.labels(), strict=True):
        y = _percent(1 - down.fraction(tick))
        lines.append(
            Markup(
                '<line x1="0" x2="100%" y1="{0}" y2="{0}"/><text class="down" x="0" dx="-8" y="{0}" dy="4">{1}</text>'
            ).format(y, label)
        )
    for tick in across.ticks:
        x = _percent(across.fraction(tick))
        lines.append(
            Markup('<text class="across" x="{}" y="100%" dy="18">{}</text>').format(x, f"{tick:,.0f}")
        )
    lines.append(Markup('<text class="down" x="0" dx="-8" y="100%" dy="18">step</text>'))
    return Markup('<g class="grid" aria-hidden="true">{}</g>').format(Markup("").join(lines))


def _marks(chart: Chart, across: Axis) -> Markup:
    """Draw the marks; their labels only in a wide chart, which has room for them, each on a line of its own."""
    lines = []
    for row, mark in enumerate(chart.marks):
        place = across.fraction(mark.step)
        if mark.look == "parting":
            lines.append(
                Markup('<rect class="parted" x="{}" y="0" width="{}" height="100%"/>').format(
                    _percent(place), _percent(max(0.0, 1 - place))
                )
            )
        label = Markup('<text x="{0}" dx="{1}" y="0" dy="{2}" text-anchor="{3}">{4}</text>').format(
            _percent(place),
            *(
                (-6, 12 + 15 * row, "end", mark.label)
                if place > 0.5
                else (6, 12 + 15 * row, "start", mark.label)
            ),
        )
        lines.append(
            Markup(
                '<line class="{3}" x1="{0}" x2="{0}" y1="0" y2="100%"><title>{1}</title></line>{2}'
            ).format(_percent(place), mark.label, label if chart.wide else "", mark.look)
        )
    return Markup('<g class="marks" aria-hidden="true">{}</g>').format(Markup("").join(lines))


def _curve(series: Series, across: Axis, down: Axis, scale: Scale) -> Markup:
    """Draw the line through the points, interrupted at every gap."""
    commands: list[str] = []
    pen_down = False
    for step, value in series.points:
        if value is not None:
            x = across.fraction(step) * PLOT_UNITS
            y = (1 - down.fraction(value / scale.divisor)) * PLOT_UNITS
            commands.append(f"{'L' if pen_down else 'M'}{x:.1f} {y:.1f}")
        pen_down = value is not None
    return Markup(
        '<svg viewBox="0 0 {0} {0}" preserveAspectRatio="none" width="100%" height="100%" class="curve {1} c{2}"><path d="{3}"/></svg>'
    ).format(PLOT_UNITS, series.look, series.colour, "".join(commands))


def _dots(series: Series, across: Axis, down: Axis, scale: Scale) -> Markup:
    """Draw dots when there are few points, and for a point between two gaps, which has no line."""
    dot_every_point = series.look == "marked" or len(series.points) <= FEW_POINTS
    padded: list[Point] = [(0.0, None), *series.points, (0.0, None)]
    circles = []
    for (_, before), (step, value), (_, after) in zip(padded, padded[1:], padded[2:], strict=False):
        if value is None or not (dot_every_point or (before is None and after is None)):
            continue
        x, y = across.fraction(step), 1 - down.fraction(value / scale.divisor)
        circles.append(Markup('<circle cx="{}" cy="{}" r="3"/>').format(_percent(x), _percent(y)))
    return Markup('<g class="dots {} c{}">{}</g>').format(
        series.look, series.colour, Markup("").join(circles)
    )


def _readout(drawn: Sequence[Series], across: Axis, down: Axis, scale: Scale) -> str:
    """Return as JSON what the page's script shows under the pointer: step, height in the plot, text."""
    series = [
        {
            "label": each.label,
            "colour": each.colour,
            "points": [
                [step, None, NOT_FINITE]
                if value is None
                else [step, round(1 - down.fraction(value / scale.divisor), 4), scale.show(value).text]
                for step, value in each.points
            ],
        }
        for each in drawn
    ]
    return json.dumps(
        {"steps": [across.low, across.high], "series": series}, ensure_ascii=False, separators=(",", ":")
    )


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}%"


def legend_key(series: Series) -> Markup:
    """Draw a short piece of the curve for the legend."""
    dot = Markup('<circle cx="12" cy="5" r="3"/>') if series.look == "marked" else ""
    return Markup(
        '<svg class="key" aria-hidden="true" width="24" height="10"><g class="curve {0} c{1}"><path d="M1 5H23"/></g><g class="dots {0} c{1}">{2}</g></svg>'
    ).format(series.look, series.colour, dot)
