"""Render what a ladder found as one page: speed and memory after each rung, the losses, and the criteria."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from crosstune.core.json_files import read_object
from crosstune.report.chart import Chart, Series
from crosstune.report.files import mapping, number
from crosstune.report.quantity import Shown, show_bytes, show_rate, show_time
from crosstune.report.series import Point
from crosstune.report.template import fill, write_page

LADDER_FILE, PAGE_FILE = "ladder.json", "ladder.html"
_BAR_WIDTH, _BAR_HEIGHT = 100.0, 14


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One rung: what the training had after it, as a multiple of the original."""

    rung: str
    title: str
    change: str
    outcome: str
    why: str
    promise: str
    speed: float | None
    memory: float | None
    speed_bar: Markup
    memory_bar: Markup


def write_ladder_page(folder: Path, *, command: str) -> Path:
    """Write `ladder.html` beside `ladder.json`; `command` trains with what was found."""
    target = folder / PAGE_FILE
    write_page(target, render_ladder(read_object(folder / LADDER_FILE), name=folder.name, command=command))
    return target


def render_ladder(found: Mapping[str, Any], *, name: str, command: str) -> str:
    ends = mapping(found.get("ends"))
    return fill(
        "ladder.html.jinja",
        name=name,
        bars=waterfall(_rows(found.get("rungs"))),
        criteria=_rows(found.get("criteria")),
        ends=ends,
        figures=_figures(ends),
        charts=[chart for chart in _losses(ends) if chart.values],
        num_kept=sum(row.get("outcome") == "kept" for row in _rows(found.get("rungs"))),
        options=mapping(found.get("options")),
        asked=mapping(found.get("asked")),
        command=command,
        written=show_time(datetime.now().astimezone()),
    )


def waterfall(rungs: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """Return the rungs with the speed and memory that they led to; what was rolled back shows what it would have been."""
    tried: list[tuple[Mapping[str, Any], float | None, float | None]] = []
    speed = memory = 1.0
    for rung in rungs:
        measured = mapping(rung.get("measured"))
        factor, share = number(measured.get("speed")), number(measured.get("memory"))
        after = (speed * factor if factor else None, memory * share if share else None)
        tried.append((rung, *after))
        if rung.get("outcome") == "kept":
            speed, memory = after[0] or speed, after[1] or memory
    fastest = max([1.0, *(faster or 0.0 for _, faster, _ in tried)])
    largest = max([1.0, *(larger or 0.0 for _, _, larger in tried)])
    return [
        Bar(
            rung=str(rung.get("rung")),
            title=str(rung.get("title")),
            change=_change(mapping(rung.get("change"))),
            outcome=str(rung.get("outcome")),
            why=str(rung.get("why")),
            promise=str(rung.get("promise")),
            speed=faster,
            memory=larger,
            speed_bar=_bar(faster, fastest, colour=1 if rung.get("outcome") == "kept" else 7),
            memory_bar=_bar(larger, largest, colour=3 if rung.get("outcome") == "kept" else 7),
        )
        for rung, faster, larger in tried
    ]


def _bar(value: float | None, widest: float, *, colour: int) -> Markup:
    """Draw a value with a line at 1, the original."""
    if value is None:
        return Markup("")
    width, line = (_BAR_WIDTH * min(part, widest) / widest for part in (value, 1.0))
    return Markup(
        '<svg class="rung-bar c{colour}" viewBox="0 0 100 {height}" preserveAspectRatio="none" aria-hidden="true">'
        '<rect width="{width:.2f}" height="{height}"></rect>'
        '<line x1="{line:.2f}" x2="{line:.2f}" y1="0" y2="{height}"></line></svg>'
    ).format(colour=colour, height=_BAR_HEIGHT, width=width, line=line)


def _change(change: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {str(value).lower() if isinstance(value, bool) else value}" for key, value in change.items()
    )


def _rows(value: Any) -> list[Mapping[str, Any]]:
    return [mapping(row) for row in value] if isinstance(value, list) else []


def _first(value: Any) -> Mapping[str, Any]:
    rows = _rows(value)
    return rows[0] if rows else {}


def _figures(ends: Mapping[str, Any]) -> list[tuple[str, Shown]]:
    base, new = _rows(ends.get("base")), _rows(ends.get("new"))
    if not base or not new:
        return []
    speed, memory = number(ends.get("speed")) or 1.0, number(ends.get("memory")) or 1.0
    rate, over = "tokens_per_s", "speed"
    if ends.get("by_cpu_time"):
        rate, over = "tokens_per_cpu_s", "speed by processor time"
    return [
        (f"original {over}", show_rate(_middle(base, rate))),
        (f"final {over}", show_rate(_middle(new, rate))),
        ("ratio", Shown(f"x {speed:.2f}")),
        ("original peak memory", show_bytes(_middle(base, "peak_bytes"))),
        ("final peak memory", show_bytes(_middle(new, "peak_bytes"))),
        ("ratio", Shown(f"x {memory:.2f}")),
    ]


def _middle(trials: Sequence[Mapping[str, Any]], key: str) -> float:
    return statistics.median(number(trial.get(key)) or 0.0 for trial in trials)


def _losses(ends: Mapping[str, Any]) -> list[Chart]:
    original, final = (_points(_first(ends.get(side)).get("losses")) for side in ("base", "new"))
    series = [
        Series(label="original options", points=original, colour=1),
        Series(label="final options", points=final, colour=2, look="marked"),
    ]
    return [
        Chart(
            title="Loss of each step",
            series=[one for one in series if one.points],
            wide=True,
            shows_figures=False,
        )
    ]


def _points(losses: Any) -> list[Point]:
    found = losses if isinstance(losses, list) else []
    return [(float(step), number(value)) for step, value in enumerate(found, start=1)]
