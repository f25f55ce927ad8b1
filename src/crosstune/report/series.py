"""Extract series of values over steps, smooth them, and downsample them without losing their extremes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from crosstune.core.events import Evaluated, StepMetrics
from crosstune.report.files import RunFiles, mapping, number

Point = tuple[float, float | None]
"""A step and its value; None when the value was not finite."""

NUM_BUCKETS = 120
SMOOTHED_SHARE = 20
"""The smoothing window covers one part in this many of all points."""
FEWEST_TO_SMOOTH = 12


def step_points(rows: Sequence[Mapping[str, Any]], key: str) -> list[Point]:
    """Return the values of one key. A row without the key is skipped; a null value is a gap."""
    return [(float(row["step"]), number(row[key])) for row in rows if key in row]


def task_metrics(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the metrics that a task adds to the rows of metrics.jsonl. They are fractions; the count that
    a recipe adds is a whole number."""
    known = StepMetrics.__annotations__
    return list(
        dict.fromkeys(
            name
            for row in rows
            for name, value in row.items()
            if name not in known and isinstance(value, float)
        )
    )


def evaluation_points(run: RunFiles) -> dict[str, list[Point]]:
    """Return every evaluated metric over the steps. For a step evaluated twice, the last value counts."""
    found: dict[str, dict[float, float | None]] = {}
    for event in run.events_of(Evaluated):
        step = evaluation_step(event, run)
        for name, value in mapping(event.get("metrics")).items():
            found.setdefault(str(name), {})[step] = number(value)
    return {name: sorted(values.items(), key=lambda point: point[0]) for name, values in found.items()}


def evaluation_step(event: Mapping[str, Any], run: RunFiles) -> float:
    step = number(event.get("step"))
    if step is not None:
        return step
    return float(run.last_step) if event.get("when") == "after" else 0.0


def finite_values(points: Sequence[Point]) -> list[float]:
    return [value for _, value in points if value is not None]


def smoothing_window(num_points: int) -> int:
    """Return an odd number of points to average over; 1 when there are too few points to smooth."""
    if num_points < FEWEST_TO_SMOOTH:
        return 1
    return max(5, num_points // SMOOTHED_SHARE) | 1


def smooth(points: Sequence[Point], *, window: int) -> list[Point]:
    """Return the centred moving mean, which does not lag behind the values. Gaps stay gaps."""
    half = window // 2
    values = [value for _, value in points]
    sums = [0.0, *accumulate(value or 0.0 for value in values)]
    counts = [0, *accumulate(int(value is not None) for value in values)]
    smoothed: list[Point] = []
    for index, (step, value) in enumerate(points):
        start, stop = max(0, index - half), min(len(points), index + half + 1)
        count = counts[stop] - counts[start]
        smoothed.append((step, None if value is None else (sums[stop] - sums[start]) / count))
    return smoothed


def kept_indices(points: Sequence[Point], *, num_buckets: int = NUM_BUCKETS) -> list[int]:
    """Return the indices to draw: the first, the last, and per bucket the lowest, the highest and one gap."""
    if len(points) <= 3 * num_buckets:
        return list(range(len(points)))
    keep = {0, len(points) - 1}
    for bucket in range(num_buckets):
        start = bucket * len(points) // num_buckets
        stop = (bucket + 1) * len(points) // num_buckets
        keep |= _extremes(points, start, stop)
    return sorted(keep)


def _extremes(points: Sequence[Point], start: int, stop: int) -> set[int]:
    known = [(value, index) for index in range(start, stop) if (value := points[index][1]) is not None]
    gap = next((index for index in range(start, stop) if points[index][1] is None), None)
    keep = {min(known)[1], max(known)[1]} if known else set()
    return keep if gap is None else keep | {gap}
