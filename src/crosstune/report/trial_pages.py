"""Render a ladder and a sweep as pages: speed and memory after each rung, the values of all trials, the importance of options."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from crosstune.files.json_files import read_object
from crosstune.report.charts import NUM_COLORS, Chart, Series
from crosstune.report.files import listed, mapping, number
from crosstune.report.formatting import (
    FormattedValue,
    display_of,
    show_bytes,
    show_option,
    show_rate,
    show_seconds,
    show_setting,
    show_time,
)
from crosstune.report.series import Point
from crosstune.report.template import fill, write_page

LADDER_FILE, SWEEP_FILE = "ladder.json", "sweep.json"


def write_trials_page(file: Path, *, command: str) -> Path:
    """Write the page of a ladder.json or sweep.json next to it; `command` trains with the options that were found."""
    target = file.with_suffix(".html")
    write_page(target, render_trials(file, command=command), is_own=True)
    return target


def render_trials(file: Path, *, command: str) -> str:
    render = render_ladder if file.name == LADDER_FILE else render_sweep
    return render(read_object(file), name=file.parent.name, command=command)


def render_ladder(found: Mapping[str, Any], *, name: str, command: str) -> str:
    ends = mapping(found.get("ends"))
    rungs = waterfall([mapping(rung) for rung in listed(found.get("rungs"))])
    return fill(
        "ladder.html.jinja",
        name=name,
        tried=[rung for rung in rungs if rung["outcome"] != "does not apply"],
        others=[rung for rung in rungs if rung["outcome"] == "does not apply"],
        criteria=[
            {key: str(mapping(row).get(key, "")) for key in ("what", "met", "measured")}
            for row in listed(found.get("criteria"))
        ],
        ratios=[number(ends.get(key)) or 1.0 for key in ("speed", "memory")],
        figures=end_figures(ends),
        charts=[chart for chart in [_losses(ends)] if chart.values],
        num_kept=sum(rung["outcome"] == "kept" for rung in rungs),
        command=command,
        written=show_time(datetime.now().astimezone()),
    )


def waterfall(rungs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each rung with the speed and memory it reached, relative to the original; also if it was rolled back."""
    rows: list[dict[str, Any]] = []
    reached = {"speed": 1.0, "memory": 1.0}
    for rung in rungs:
        row: dict[str, Any] = {key: str(rung.get(key)) for key in ("title", "outcome", "why", "promise")}
        row["change"] = ", ".join(
            f"{key} {str(value).lower() if isinstance(value, bool) else value}"
            for key, value in mapping(rung.get("change")).items()
        )
        for key, before in reached.items():
            factor = number(mapping(rung.get("measured")).get(key))
            row[key] = before * factor if factor else None
        if row["outcome"] == "kept":
            reached = {key: row[key] or before for key, before in reached.items()}
        rows.append(row)
    for key in reached:
        widest = max([1.0, *(row[key] or 0.0 for row in rows)])
        for row in rows:
            # The width of the bar and the position of the original's line, in percent.
            row[f"{key}_bar"] = (100 * (row[key] or 0.0) / widest, 100 / widest)
    return rows


def _trials(ends: Mapping[str, Any], side: str) -> list[Mapping[str, Any]]:
    return [mapping(trial) for trial in listed(ends.get(side))]


def end_figures(ends: Mapping[str, Any]) -> list[tuple[str, FormattedValue]]:
    """Return the speed and the peak memory of the original and the final options, and their ratios."""
    base, new = _trials(ends, "base"), _trials(ends, "new")
    if not base or not new:
        return []
    rate, over = "tokens_per_s", "speed"
    if ends.get("by_cpu_time"):
        rate, over = "tokens_per_cpu_s", "speed by CPU time"
    return [
        (f"original {over}", show_rate(_middle(base, rate))),
        (f"final {over}", show_rate(_middle(new, rate))),
        ("ratio", FormattedValue(f"x {number(ends.get('speed')) or 1.0:.2f}")),
        ("original peak memory", show_bytes(_middle(base, "peak_bytes"))),
        ("final peak memory", show_bytes(_middle(new, "peak_bytes"))),
        ("ratio", FormattedValue(f"x {number(ends.get('memory')) or 1.0:.2f}")),
    ]


def _middle(trials: Sequence[Mapping[str, Any]], key: str) -> float:
    return statistics.median(number(trial.get(key)) or 0.0 for trial in trials)


def _losses(ends: Mapping[str, Any]) -> Chart:
    series = [Series(label="original options", points=_points(ends, "base"), color=1)]
    series.append(Series(label="final options", points=_points(ends, "new"), color=2, look="marked"))
    found = [each for each in series if each.points]
    return Chart(title="Loss of each step", series=found, shape="wide", shows_figures=False)


def _points(ends: Mapping[str, Any], side: str) -> list[tuple[float, float | None]]:
    """Return the losses of the first trial."""
    losses = listed(next(iter(_trials(ends, side)), {}).get("losses"))
    return [(float(step), number(value)) for step, value in enumerate(losses, start=1)]


STATUSES = ("finished", "pruned", "failed", "started")
MOST_CURVES = 60


def render_sweep(found: Mapping[str, Any], *, name: str, command: str) -> str:
    """Return the page. Its trials are ordered: the best first."""
    metric, over = str(found.get("metric")), mapping(found.get("over"))
    trials = [mapping(trial) for trial in listed(found.get("trials"))]
    values = [value for trial in trials if (value := number(trial.get("value"))) is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)
    axes = {option: mapping(dimension) for option, dimension in over.items()} | {
        metric: {"low": low, "high": high}
    }
    show = display_of(metric, values).show
    rows = [
        {
            "name": str(trial.get("name")),
            "status": "best" if trial.get("name") == found.get("best") else str(trial.get("status")),
            "cells": [_shown(mapping(trial.get("params")).get(option)) for option in over],
            "value": FormattedValue("-") if (value := number(trial.get("value"))) is None else show(value),
            "step": str(trial.get("step") or "-"),
            "time": show_seconds(number(trial.get("seconds")) or 0.0),
            "error": str(trial.get("error") or ""),
            "path": "" if value is None else _path({**mapping(trial.get("params")), metric: value}, axes),
        }
        for trial in trials
    ]
    labels = [
        (option, [(100 - 100 * _height(mark, axis), _shown(mark).text) for mark in _marks(axis)])
        for option, axis in axes.items()
    ]
    labels[-1] = metric, [(100.0, show(low).text), (0.0, show(high).text)]
    curves = _curves(metric, trials, best=found.get("best"))
    return fill(
        "sweep.html.jinja",
        name=name,
        metric=metric,
        goal="highest" if found.get("goal") == "max" else "lowest",
        axes=labels,
        rows=rows,
        best=next((row for row in rows if row["status"] == "best"), None),
        importance=[(str(k), 100 * (number(v) or 0.0)) for k, v in mapping(found.get("importance")).items()],
        charts=[curves] if curves.values else [],
        command=command,
        written=show_time(datetime.now().astimezone()),
    )


def _shown(value: Any) -> FormattedValue:
    return show_setting(value) if isinstance(value, float) else show_option(value)


def _marks(axis: Mapping[str, Any]) -> list[Any]:
    return listed(axis.get("choices")) or [axis.get("low"), axis.get("high")]


def _height(value: Any, axis: Mapping[str, Any]) -> float:
    """Return the position of a value on its axis: 0 at the low end, 1 at the high end."""
    if choices := listed(axis.get("choices")):
        return choices.index(value) / max(1, len(choices) - 1) if value in choices else 0.5
    low, high, at = (number(end) or 0.0 for end in (axis.get("low"), axis.get("high"), value))
    if axis.get("is_log") and min(low, high, at) > 0:
        low, high, at = math.log(low), math.log(high), math.log(at)
    return (at - low) / (high - low) if high > low else 0.5


def _path(values: Mapping[str, Any], axes: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the SVG path of a trial from axis to axis, in thousandths."""
    step = 1000 / max(1, len(axes) - 1)
    heights = [_height(values.get(option), axis) for option, axis in axes.items()]
    points = [f"{place * step:.1f} {1000 - 1000 * height:.1f}" for place, height in enumerate(heights)]
    return "M" + "L".join(points)


def _curves(metric: str, trials: Sequence[Mapping[str, Any]], *, best: Any) -> Chart:
    """Return the evaluations of the best trials over their steps."""
    series = list[Series]()
    for trial in trials[:MOST_CURVES]:
        rows = mapping(trial.get("evaluations"))
        found = {float(at): number(value) for at, value in rows.items() if at.isdecimal() and len(at) < 16}
        if (step := number(trial.get("step"))) is not None:
            found[step] = number(trial.get("value"))
        points: list[Point] = sorted(found.items())
        is_best = trial.get("name") == best
        color = 1 if is_best else 2 + len(series) % (NUM_COLORS - 1)
        if any(value is not None for _, value in points):
            look: Any = "line" if is_best else "faint"
            series.append(Series(label=str(trial.get("name")), points=points, color=color, look=look))
    display = display_of(metric, [value for each in series for _, value in each.points if value is not None])
    return Chart(
        title=f"{metric} of each trial",
        series=series,
        unit=display.unit,
        divisor=display.divisor,
        show=display.show,
        shape="wide",
        shows_figures=False,
    )
