"""Collect the test of a judge: metrics beside baselines, scatter, confusion and calibration, and the worst disagreements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from crosstune.core.json_files import parse_json, read_json
from crosstune.core.plain_files import UnreadableFile, read_plain_text
from crosstune.report.axis import Axis, value_axis
from crosstune.report.files import mapping, number
from crosstune.report.quantity import NOT_FINITE

METRICS_FILE, PREDICTIONS_FILE = "test_metrics.json", "test_predictions.json"
MOST_POINTS = 2000
MOST_CHARACTERS = 400
_LIMIT_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Worst:
    task: str
    answer: str
    expected: str
    predicted: str
    feedback: str


@dataclass(frozen=True, kw_only=True)
class JudgeTest:
    columns: list[str]
    rows: list[tuple[str, list[str]]]
    """Metric -> its value for the judge and for each baseline."""
    notes: list[str]
    num_items: int
    scatter: Markup
    calibration: Markup
    labels: list[str]
    confusion: list[tuple[str, list[tuple[int, int]]]]
    """Expected label -> for each predicted one the count, and its share of the row in tenths."""
    worst: list[Worst]


def collect_judge_test(folder: Path) -> JudgeTest | None:
    """Return the test of the judge in a run folder; None if there is none."""
    if not (folder / METRICS_FILE).is_file():
        return None
    report = read_json(folder / METRICS_FILE)
    columns = {
        "judge": report,
        **{name: mapping(value) for name, value in mapping(report.get("baselines")).items()},
    }
    names = list(dict.fromkeys(name for each in columns.values() for name in mapping(each.get("metrics"))))
    table = mapping(report.get("confusion"))
    labels = [str(label) for label in table.get("labels", ())]
    counts = [list(row) for row in table.get("counts", ())]
    used = [place for place in range(len(labels)) if any(counts[place]) or any(row[place] for row in counts)]
    return JudgeTest(
        columns=list(columns),
        rows=[(name, [_metric(each, name) for each in columns.values()]) for name in names],
        notes=[str(note) for note in report.get("notes", ())],
        num_items=int(number(report.get("num_items")) or 0),
        scatter=_scatter(_points(folder)),
        calibration=_calibration(report.get("calibration") or ()),
        labels=[labels[place] for place in used],
        confusion=[
            (
                labels[row],
                [(counts[row][place], _tenths(counts[row][place], sum(counts[row]))) for place in used],
            )
            for row in used
        ],
        worst=[_worst(mapping(row)) for row in report.get("worst", ())],
    )


def _metric(report: Mapping[str, Any], name: str) -> str:
    value = number(mapping(report.get("metrics")).get(name))
    if value is None:
        return "–" if name not in mapping(report.get("metrics")) else NOT_FINITE
    bounds = mapping(report.get("intervals")).get(name)
    return f"{value:.3f}" + (f" [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else "")


def _tenths(count: int, total: int) -> int:
    return round(10 * count / total) if total else 0


def _points(folder: Path) -> list[tuple[float, float]]:
    """Return the expected and the predicted scores; none for pairs."""
    try:
        rows = parse_json(read_plain_text(folder / PREDICTIONS_FILE, limit=_LIMIT_BYTES))
    except (UnreadableFile, ValueError):
        return []
    pairs = [
        (number(row.get("expected")), number(row.get("predicted")))
        for row in map(mapping, rows if isinstance(rows, list) else ())
    ]
    known = [(first, second) for first, second in pairs if first is not None and second is not None]
    step = -(-len(known) // MOST_POINTS) if known else 1
    return known[::step]


def _scatter(points: Sequence[tuple[float, float]]) -> Markup:
    if not points:
        return Markup()
    axis = value_axis([value for point in points for value in point], from_zero=True)
    return _square(
        points,
        axis,
        across="people",
        label=f"Scores of people and of the judge for {len(points)} items",
        radius=2.5,
    )


def _calibration(bins: Sequence[Any]) -> Markup:
    points = [
        (number(mapping(each).get("confidence")), number(mapping(each).get("accuracy"))) for each in bins
    ]
    known = [(first, second) for first, second in points if first is not None and second is not None]
    if not known:
        return Markup()
    axis = Axis(low=0.0, high=1.0, ticks=(0.0, 0.25, 0.5, 0.75, 1.0))
    return _square(
        known, axis, across="confidence", label=f"Accuracy over confidence in {len(known)} bins", radius=4.5
    )


def _square(
    points: Sequence[tuple[float, float]], axis: Axis, *, across: str, label: str, radius: float
) -> Markup:
    """Draw points over the same axis in both directions, with the diagonal on which they would agree."""
    lines = []
    for tick, text in zip(axis.ticks, axis.labels(), strict=True):
        place = axis.fraction(tick)
        lines.append(
            Markup(
                '<line x1="0" x2="100%" y1="{1}" y2="{1}"/><text class="down" x="0" dx="-8" y="{1}" dy="4">{2}</text>'
                '<text class="across" x="{0}" y="100%" dy="18">{2}</text>'
            ).format(_percent(place), _percent(1 - place), text)
        )
    circles = [
        Markup('<circle cx="{}" cy="{}" r="{}"/>').format(
            _percent(axis.fraction(first)), _percent(1 - axis.fraction(second)), radius
        )
        for first, second in points
    ]
    return Markup(
        '<svg class="plot" role="img" aria-label="{}"><g class="grid" aria-hidden="true">{}'
        '<text class="down" x="100%" y="100%" dy="34">{}</text></g>'
        '<g class="marks"><line x1="0" y1="100%" x2="100%" y2="0"/></g><g class="dots marked c2">{}</g></svg>'
    ).format(label, Markup("").join(lines), across, Markup("").join(circles))


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}%"


def _worst(row: Mapping[str, Any]) -> Worst:
    answer = row.get("answer") or f"A: {row.get('answer_a', '')}\nB: {row.get('answer_b', '')}"
    predicted = row.get("predicted")
    said = (
        "unreadable"
        if predicted is None
        else f"{predicted:.1f}"
        if isinstance(predicted, float)
        else str(predicted)
    )
    return Worst(
        task=_cut(row.get("task")),
        answer=_cut(answer),
        expected=str(row.get("expected")),
        predicted=said,
        feedback=_cut(row.get("text") or row.get("feedback")),
    )


def _cut(text: Any) -> str:
    said = str(text or "")
    return said if len(said) <= MOST_CHARACTERS else f"{said[:MOST_CHARACTERS]}…"
