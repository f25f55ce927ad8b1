"""Collect the benchmarks of a run: each task before and after training, with intervals and the prompt format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstune.files.json_files import read_json
from crosstune.files.run_record import BENCHMARKS
from crosstune.report.files import listed, mapping, number
from crosstune.report.formatting import MINUS

_Z95 = 1.96
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
    """Describe the prompts: chat template or plain text, examples in the prompt, and how many rows were tested."""
    _, _, template, shots, limit = key
    count = number(next(iter(sides.values())).get("num_samples"))
    words = ["chat template" if template else "plain text", f"{shots} examples" if shots else "no examples"]
    words += [f"{'first ' * bool(limit)}{count:,.0f} rows"] if count else []
    return ", ".join(words)


def _cell(result: Mapping[str, Any] | None) -> str:
    """Return a value and its 95 % interval, from the harness's standard error."""
    if result is None:
        return "–"
    value, error = number(result.get("value")) or 0.0, number(result.get("stderr"))
    if error is None:
        return f"{value:.4f}"
    return f"{value:.4f} ({value - _Z95 * error:.4f} to {value + _Z95 * error:.4f})".replace(
        "(-", f"({MINUS}"
    )


def _change(sides: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe the difference; within the intervals of both sides it is not distinguished from noise."""
    if len(sides) < 2:
        return ""
    before, after = (number(sides[side].get("value")) or 0.0 for side in SIDES)
    errors = [number(sides[side].get("stderr")) for side in SIDES]
    delta = after - before
    text = f"{'+' if delta > 0 else MINUS if delta < 0 else ''}{abs(delta):.4f}"
    if errors[0] is None or errors[1] is None:
        return text
    if abs(delta) <= _Z95 * (errors[0] ** 2 + errors[1] ** 2) ** 0.5:
        return f"{text}, within noise"
    lower_is_better = sides["after"].get("higher_is_better") is False
    return f"{text}, {'better' if (delta > 0) != lower_is_better else 'worse'}"
