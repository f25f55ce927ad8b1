"""Render a sweep as a page: the values of all trials as parallel coordinates, the importance of options, and the curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from crosstune.files.json_files import read_object
from crosstune.report.charts import NUM_COLOURS, Chart, Series
from crosstune.report.files import listed, mapping, number
from crosstune.report.formatting import (
    FormattedValue,
    display_of,
    show_option,
    show_seconds,
    show_setting,
    show_time,
)
from crosstune.report.series import Point
from crosstune.report.template import fill, write_page

SWEEP_FILE, PAGE_FILE = "sweep.json", "sweep.html"
STATUSES = ("finished", "pruned", "failed", "started")
MOST_CURVES = 60


def write_sweep_page(folder: Path, *, command: str) -> Path:
    """Write `sweep.html` next to `sweep.json`; `command` trains with the best values."""
    target = folder / PAGE_FILE
    write_page(target, render_sweep(read_object(folder / SWEEP_FILE), name=folder.name, command=command))
    return target


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
        colour = 1 if is_best else 2 + len(series) % (NUM_COLOURS - 1)
        if any(value is not None for _, value in points):
            look: Any = "line" if is_best else "faint"
            series.append(Series(label=str(trial.get("name")), points=points, colour=colour, look=look))
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
