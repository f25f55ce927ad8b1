"""Render a ladder as a page: speed and memory after each rung, the losses, and the criteria."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from crosstune.files.json_files import read_object
from crosstune.report.charts import Chart, Series
from crosstune.report.files import listed, mapping, number
from crosstune.report.formatting import FormattedValue, show_bytes, show_rate, show_time
from crosstune.report.template import fill, write_page

LADDER_FILE, PAGE_FILE = "ladder.json", "ladder.html"


def write_ladder_page(folder: Path, *, command: str) -> Path:
    """Write `ladder.html` next to `ladder.json`; `command` trains with the final options."""
    target = folder / PAGE_FILE
    write_page(target, render_ladder(read_object(folder / LADDER_FILE), name=folder.name, command=command))
    return target


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
        figures=_figures(ends),
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


def _figures(ends: Mapping[str, Any]) -> list[tuple[str, FormattedValue]]:
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
    series = [Series(label="original options", points=_points(ends, "base"), colour=1)]
    series.append(Series(label="final options", points=_points(ends, "new"), colour=2, look="marked"))
    found = [each for each in series if each.points]
    return Chart(title="Loss of each step", series=found, shape="wide", shows_figures=False)


def _points(ends: Mapping[str, Any], side: str) -> list[tuple[float, float | None]]:
    """Return the losses of the first trial."""
    losses = listed(next(iter(_trials(ends, side)), {}).get("losses"))
    return [(float(step), number(value)) for step, value in enumerate(losses, start=1)]
