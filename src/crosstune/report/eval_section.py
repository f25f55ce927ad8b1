"""Collect the benchmarks of a run: each task before and after training, with intervals and the prompt format."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstune.core.intervals import Z95, Interval, differ, wilson
from crosstune.files.json_files import read_json
from crosstune.files.run_record import BENCHMARKS
from crosstune.report.files import listed, mapping, number
from crosstune.report.formatting import MINUS

SIDES = ("before", "after")
_KEY = ("task", "metric", "chat_template", "num_fewshot", "limit")


def collect_eval(folder: Path) -> dict[str, Any] | None:
    """Return the rows of the benchmarks in a run folder; None if there are none."""
    return eval_rows(listed(read_json(folder / BENCHMARKS).get("results")))


def eval_rows(results: list[Any]) -> dict[str, Any] | None:
    """Return a row for each task, metric and prompt format, with the newest result of each side."""
    found: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for each in map(mapping, results):
        if number(each.get("value")) is not None and each.get("side") in SIDES:
            key = tuple(each.get(name) for name in _KEY)
            if not any(isinstance(part, (list, dict)) for part in key):  # a damaged file
                found.setdefault(key, {})[each["side"]] = each
    if not found:
        return None
    rows = [
        {
            "task": str(key[0]),
            "metric": str(key[1]),
            "format": _format(key, sides),
            **{side: _cell(sides.get(side)) for side in SIDES},
            "change": _change(sides),
        }
        for key, sides in found.items()
    ]
    return {"rows": rows, "num_tasks": len({row["task"] for row in rows})}


def _format(key: tuple[Any, ...], sides: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe the prompts: chat template or plain text, examples in the prompt, and the number of tested rows."""
    _, _, template, shots, limit = key
    count = number(next(iter(sides.values())).get("num_samples"))
    words = ["chat template" if template else "plain text", f"{shots} examples" if shots else "no examples"]
    words += [f"{'first ' * bool(limit)}{count:,.0f} rows"] if count else []
    return ", ".join(words)


def _interval(result: Mapping[str, Any]) -> Interval | None:
    """Return the 95 % interval of a value: Wilson's for a fraction of rows, otherwise from the harness's standard error."""
    value, error = number(result.get("value")) or 0.0, number(result.get("stderr"))
    count = int(number(result.get("num_samples")) or 0)
    if error is None:
        return None
    if count > 1 and 0 <= value <= 1 and math.isclose(error, math.sqrt(value * (1 - value) / (count - 1))):
        return wilson(value, count)
    return value - Z95 * error, value + Z95 * error


def _cell(result: Mapping[str, Any] | None) -> str:
    """Return a value and its 95 % interval."""
    if result is None:
        return "–"
    value, interval = number(result.get("value")) or 0.0, _interval(result)
    if interval is None:
        return f"{value:.4f}"
    return f"{value:.4f} ({interval[0]:.4f} to {interval[1]:.4f})".replace("(-", f"({MINUS}")


def _change(sides: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe the difference; if its interval contains 0, it is not distinguished from noise."""
    if len(sides) < 2:
        return ""
    before, after = (number(sides[side].get("value")) or 0.0 for side in SIDES)
    delta = after - before
    text = f"{'+' if delta > 0 else MINUS if delta < 0 else ''}{abs(delta):.4f}"
    intervals = [found for side in SIDES if (found := _interval(sides[side])) is not None]
    if len(intervals) < 2:
        return text
    if not differ(before, after, intervals=intervals):
        return f"{text}, within noise"
    lower_is_better = sides["after"].get("higher_is_better") is False
    return f"{text}, {'better' if (delta > 0) != lower_is_better else 'worse'}"
