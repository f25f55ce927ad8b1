"""Render a comparison of runs as one page with overlaid curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from crosstune.report.chart import Chart, Scale, Series, byte_scale
from crosstune.report.comparison import Comparison
from crosstune.report.files import RunFiles
from crosstune.report.metric import display_of, ordered
from crosstune.report.quantity import show_bytes, show_rate, show_time
from crosstune.report.samples import Answer, collect_samples, compare_answers
from crosstune.report.series import (
    Point,
    evaluation_points,
    finite_values,
    smooth,
    smoothing_window,
    step_points,
)
from crosstune.report.template import fill, write_page
from crosstune.report.turning_points import evaluation_losses

NUM_COLOURS = 7
MOST_PROMPTS = 20


@dataclass(frozen=True, kw_only=True)
class SharedPrompt:
    """The last answers of several runs to one prompt."""

    prompt: str
    reference: str
    answers: list[Answer]


def write_comparison(found: Comparison, target: Path) -> Path:
    write_page(target, render_comparison(found))
    return target


def render_comparison(found: Comparison) -> str:
    now = datetime.now().astimezone()
    return fill(
        "compare.html.jinja",
        found=found,
        charts=overlays(found),
        prompts=shared_prompts(found),
        written=show_time(now),
    )


def overlays(found: Comparison) -> list[Chart]:
    """Return the curves of all runs in the same charts; a chart without a finite value is left out."""
    runs = found.runs
    charts = [
        _chart("Training loss, smoothed", found, lambda run: _smoothed(run, "loss"), wide=True),
        _chart("Evaluation loss", found, evaluation_losses, wide=True, marked=True),
    ]
    evaluated = [evaluation_points(run) for run in runs]
    for name in ordered(dict.fromkeys(name for points in evaluated for name in points if name != "loss")):
        values = [value for points in evaluated for value in finite_values(points.get(name, []))]
        display = display_of(name, values)
        scale = (
            Scale(unit="%", divisor=0.01, show=display.show) if display.is_share else Scale(show=display.show)
        )
        chart = _chart(
            f"Evaluation: {display.label}",
            found,
            lambda run, name=name: evaluation_points(run).get(name, []),  # type: ignore[misc]
            marked=True,
        )
        charts.append(replace(chart, scale=scale, from_zero=display.is_share))
    speed = _chart("Throughput, smoothed", found, lambda run: _smoothed(run, "tokens_per_s"))
    memory = _chart("Memory", found, lambda run: step_points(run.metrics, "memory_bytes"))
    charts.append(replace(speed, scale=Scale(unit="tok/s", show=show_rate), from_zero=True))
    charts.append(replace(memory, scale=byte_scale(memory.values, show=show_bytes), from_zero=True))
    return [chart for chart in charts if chart.values]


def _chart(
    title: str,
    found: Comparison,
    points_of: Callable[[RunFiles], Sequence[Point]],
    *,
    wide: bool = False,
    marked: bool = False,
) -> Chart:
    series = [
        Series(
            label=name,
            points=points,
            colour=1 + place % NUM_COLOURS,
            look="marked" if marked or place >= NUM_COLOURS else "line",
        )
        for place, (name, run) in enumerate(zip(found.names, found.runs, strict=True))
        if finite_values(points := points_of(run))
    ]
    steps = (0.0, max((float(run.last_step) for run in found.runs), default=1.0))
    return Chart(title=title, series=series, steps=steps, wide=wide, shows_figures=False)


def _smoothed(run: RunFiles, key: str) -> list[Point]:
    points = step_points(run.metrics, key)
    return smooth(points, window=smoothing_window(len(points)))


def shared_prompts(found: Comparison) -> list[SharedPrompt]:
    """Return the prompts that at least two runs answered, with the last answer of each run."""
    tables = [
        {row.prompt: (row.reference, row.answers[-1]) for row in collect_samples(run).rows}
        for run in found.runs
    ]
    prompts = dict.fromkeys(prompt for table in tables for prompt in table)
    shared = [prompt for prompt in prompts if sum(prompt in table for table in tables) > 1]
    return [
        SharedPrompt(
            prompt=prompt,
            reference=next((t[prompt][0] for t in tables if prompt in t and t[prompt][0]), ""),
            answers=compare_answers([t[prompt][1] if prompt in t else Answer(text=None) for t in tables]),
        )
        for prompt in shared[:MOST_PROMPTS]
    ]
