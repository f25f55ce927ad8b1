"""Compare what was planned for a run with what was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from crosstune.report.files import RunFiles, mapping, number
from crosstune.report.metric import MINUS
from crosstune.report.quantity import (
    Shown,
    show_bytes,
    show_count,
    show_number,
    show_rate,
    show_seconds,
    show_share,
)


@dataclass(frozen=True, kw_only=True)
class Expected:
    label: str
    planned: Shown
    measured: Shown | None
    difference: str


def plan_against_measured(run: RunFiles) -> list[Expected]:
    """Return each planned figure beside the measured one; figures that the plan does not have are left out."""
    plan, summary = run.plan, run.summary
    estimate = mapping(plan.get("estimate"))
    steps = number(summary.get("steps"))
    rows: list[tuple[str, float | None, float | None, Callable[[float], Shown]]] = [
        (
            "Peak memory",
            number(plan.get("estimated_bytes")) or number(estimate.get("bytes")),
            number(summary.get("peak_memory_bytes")),
            show_bytes,
        ),
        (
            "Steps",
            number(plan.get("num_steps")),
            steps if steps is not None else float(run.last_step),
            show_count,
        ),
        ("Speed", number(estimate.get("tokens_per_s")), number(summary.get("tokens_per_s")), show_rate),
        ("Time", number(estimate.get("seconds")), number(summary.get("seconds")), show_seconds),
    ]
    return [
        Expected(
            label=label,
            planned=show(planned),
            measured=show(measured) if measured is not None else None,
            difference=_difference(planned, measured),
        )
        for label, planned, measured, show in rows
        if planned
    ]


def _difference(planned: float, measured: float | None) -> str:
    if measured is None or planned <= 0:
        return ""
    change = measured / planned - 1
    if abs(change) < 0.005:
        return "as planned"
    if change >= 1:
        return f"{show_number(1 + change, digits=2).text} times as much"
    return f"{'+' if change > 0 else MINUS}{show_share(abs(change)).text}"
