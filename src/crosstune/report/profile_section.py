"""Collect the profile of a run: the time of each phase, and the utilization of the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crosstune.core.events import Profiled
from crosstune.report.charts import memory_chart
from crosstune.report.files import RunFiles, listed, mapping, number
from crosstune.report.formatting import FormattedValue, show_number, show_seconds, show_share

MAX_OPERATORS = 15
MAX_PATHS = 20


def collect_profile(run: RunFiles) -> dict[str, Any] | None:
    """Return the last recorded profile; None if there is none."""
    events = run.events_of(Profiled)
    result = mapping(events[-1].get("result")) if events else {}
    step_s, phases = number(result.get("step_s")), mapping(result.get("phases"))
    if step_s is None or not phases:
        return None
    steps = len(listed(result.get("steps")))
    return {
        "title": f"{show_seconds(step_s).text} per step, the mean of {steps} recorded steps",
        "phases": _phases(phases),
        "figures": _figures(result, step_s),
        "operators": [_operator(mapping(each)) for each in listed(result.get("operators"))[:MAX_OPERATORS]],
        "memory": memory_chart(result.get("memory_timeline")),
        "files": [str(events[-1].get("path", "")), *map(str, listed(result.get("files")))][:MAX_PATHS],
    }


def _phases(phases: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each phase, with its position in the bar in percent."""
    rows, start = list[dict[str, Any]](), 0.0
    for place, (name, phase) in enumerate(phases.items()):
        share = number(mapping(phase).get("share")) or 0.0
        width = 100 * min(1.0, max(0.0, share))
        row = {"name": name, "share": show_share(share), "start": start, "width": width}
        row["colour"] = 7 if name == "other" else 1 + place % 6
        rows.append(row | {"time": show_seconds(number(mapping(phase).get("seconds")) or 0.0)})
        start += width
    return rows


def _figures(result: Mapping[str, Any], step_s: float) -> list[tuple[str, FormattedValue]]:
    """Return the utilization of the device and its measured limits."""
    limits, found = mapping(result.get("limits")), list[tuple[str, FormattedValue]]()
    busy, cores = number(result.get("device_busy_share")), number(result.get("cores_busy"))
    flops, share = number(result.get("flops")), number(result.get("limit_share"))
    if busy is not None:
        found.append(("Device busy", show_share(busy)))
    if cores is not None:
        found.append(
            ("CPU", FormattedValue(f"{cores:.1f} of {result.get('num_cores')} cores busy", repr(cores)))
        )
    if flops and step_s > 0:
        found.append(("Matmul speed", _rate(flops / step_s, "FLOP/s")))
    if share is not None:
        found.append(("Fraction of the limit", show_share(share)))
    if (matrix := number(limits.get("flops_per_s"))) is not None:
        found.append(("Measured matmul limit", _rate(matrix, f"FLOP/s in {limits.get('dtype')}")))
    if (memory := number(limits.get("bytes_per_s"))) is not None:
        found.append(("Measured memory limit", _rate(memory, "B/s")))
    return found


def _rate(value: float, unit: str) -> FormattedValue:
    prefixes = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
    factor, prefix = next((pair for pair in prefixes if value >= pair[0]), (1.0, ""))
    return FormattedValue(f"{show_number(value / factor).text} {prefix}{unit}", repr(value))


def _operator(each: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": f"{each.get('name', '')} {each.get('shapes') or ''}".strip(),
        "time": show_seconds(number(each.get("seconds")) or 0.0),
        "share": show_share(number(each.get("share")) or 0.0),
        "calls": show_number(number(each.get("calls")) or 0.0),
    }
