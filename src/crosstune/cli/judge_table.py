"""Print the metrics of a judge beside its baselines as a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from crosstune.core.judge_metrics import TITLES


def table_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the metrics as rows, the judge and each baseline as columns; in brackets the 95 % interval."""
    columns = {"judge": report, **report.get("baselines", {})}
    names = [name for name in TITLES if any(name in each["metrics"] for each in columns.values())]
    rows = [["", *columns]]
    rows += [[TITLES[name], *(_cell(each, name) for each in columns.values())] for name in names]
    rows.append(["unreadable", *(f"{each['num_unreadable']}" for each in columns.values())])
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
    yield f"{report['num_items']:,} items in {report['num_groups']:,} groups; intervals of 95 % by drawing groups again"
    for note in report.get("notes", ()):
        yield f"note: {note}"


def worst_lines(worst: Sequence[Mapping[str, Any]], *, most: int = 3) -> Iterator[str]:
    for row in worst[:most]:
        answer = row.get("answer") or f"A: {row.get('answer_a')} B: {row.get('answer_b')}"
        said = row["predicted"]
        shown = "unreadable" if said is None else f"{said:.1f}" if isinstance(said, float) else str(said)
        yield f"worst    {shown} instead of {row['expected']}: {_short(answer)}"


def _cell(report: Mapping[str, Any], name: str) -> str:
    value = report["metrics"].get(name)
    if value is None or not math.isfinite(value):
        return "-"
    bounds = report.get("intervals", {}).get(name)
    return f"{value:.3f}" + (f" [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else "")


def _short(text: str, limit: int = 90) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 4]} ..."
