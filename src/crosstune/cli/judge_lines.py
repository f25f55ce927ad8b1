"""Format the data of a judge and its test for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from crosstune.cli.arguments import Line
from crosstune.cli.terminal.output import Column, table_lines


def data_lines(dataset: str, found: Mapping[str, Any]) -> Iterator[Line]:
    how = f"judged by {found['verdict']} on the scale {found['scale']}"
    if found["verdict"] == "reward":
        how = "pairs for a reward model (Bradley-Terry); an example shows the better answer"
    yield f"data     {dataset}, {how}"
    for name, facts in found["splits"].items():
        labels = "  ".join(f"{label}: {count}" for label, count in facts["labels"].items())
        yield (
            f"{name:<8} {facts['items']:,} items in {facts['groups']:,} groups, "
            f"{facts['with_reference']:,} with a reference; {labels}"
        )
    dropped = " and were dropped" * bool(found["leaking_rows"])
    yield f"leaks    {found['leaking_rows']:,} training rows are also held out{dropped}"
    if found["unreadable_rows"]:
        yield f"skipped  {found['unreadable_rows']:,} rows cannot be read"
    yield from (f"note     {note}" for note in found["notes"])
    for number, messages in enumerate(found["shown"], start=1):
        said = "\n".join(str(message["content"]) for message in messages[:-1])
        yield f"\nexample {number}\n{said}\n[[{messages[-1]['content']}]]"


def metric_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of metrics with 95 % intervals, one column for the judge and each baseline."""
    from crosstune.report.judge_section import compare_with_best, metric_table

    columns, rows = metric_table(report)
    table = [Column(title="", cells=[title for title, _ in rows])]
    for place, column in enumerate(columns):
        cells = [
            f"{value} [{bounds}]" if bounds else value for value, bounds in (row[place] for _, row in rows)
        ]
        table.append(Column(title=column, cells=cells))
    yield from table_lines(table, width=None)
    if lead := compare_with_best(report):
        yield lead
    yield f"{report['num_items']:,} items in {report['num_groups']:,} groups; 95 % intervals by resampling groups"
    yield from (f"note: {note}" for note in report.get("notes", ()))


def worst_lines(worst: Sequence[Mapping[str, Any]], *, most: int = 3) -> Iterator[str]:
    for row in worst[:most]:
        answer = row.get("answer") or f"A: {row.get('answer_a')} B: {row.get('answer_b')}"
        shown = textwrap.shorten(answer, 90, placeholder=" ...")
        yield f"worst    {verdict_text(row['predicted'], digits=1)} instead of {row['expected']}: {shown}"


def verdict_text(said: float | str | None, *, digits: int) -> str:
    return "unreadable" if said is None else f"{said:.{digits}f}" if isinstance(said, float) else str(said)
