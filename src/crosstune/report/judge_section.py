"""Collect the test of a judge: metrics beside baselines, scatter, confusion and calibration, and the worst disagreements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from crosstune.core.json_files import parse_json, read_json
from crosstune.core.judge_metrics import LOWER_IS_BETTER, TITLES
from crosstune.core.plain_files import UnreadableFile, read_plain_text
from crosstune.report.axis import Axis, value_axis
from crosstune.report.files import mapping, number

METRICS_FILE, PREDICTIONS_FILE = "test_metrics.json", "test_predictions.json"
MOST_POINTS = 2000
MOST_CHARACTERS = 400
_LIMIT_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Worst:
    task: str
    reference: str
    answer: str
    expected: str
    predicted: str
    feedback: str


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A metric and its interval."""

    value: str
    bounds: str = ""


@dataclass(frozen=True, kw_only=True)
class JudgeTest:
    lead: str
    """The main metric of the judge, and that of its best baseline."""
    columns: list[str]
    rows: list[tuple[str, list[Cell]]]
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
    known = {name for each in columns.values() for name in mapping(each.get("metrics"))}
    names = [name for name in TITLES if name in known]
    table = mapping(report.get("confusion"))
    labels = [str(label) for label in table.get("labels", ())]
    counts = [list(row) for row in table.get("counts", ())]
    used = [place for place in range(len(labels)) if any(counts[place]) or any(row[place] for row in counts)]
    unreadable = [Cell(value=str(each.get("num_unreadable", "–"))) for each in columns.values()]
    return JudgeTest(
        lead=_lead(columns),
        columns=list(columns),
        rows=[
            *((_title(name), [_metric(each, name) for each in columns.values()]) for name in names),
            ("unreadable verdicts", unreadable),
        ],
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
            if any(counts[row])
        ],
        worst=[_worst(mapping(row)) for row in report.get("worst", ())],
    )


def _title(name: str) -> str:
    return f"{TITLES[name]} {'↓' if name in LOWER_IS_BETTER else '↑'}"


def _lead(columns: Mapping[str, Mapping[str, Any]]) -> str:
    """Say how far the judge is from people, beside the best of its baselines."""
    main = next((name for name in ("mae", "accuracy") if _value(columns["judge"], name) is not None), None)
    found = {
        name: value for name, each in columns.items() if main and (value := _value(each, main)) is not None
    }
    others = {name: value for name, value in found.items() if name != "judge"}
    if main is None or not others:
        return ""
    best = (min if main in LOWER_IS_BETTER else max)(others, key=others.__getitem__)
    if main == "mae":
        said = f"Its scores are {found['judge']:.2f} points away from people's on average"
        return f"{said}; those of the best baseline ({best}) {others[best]:.2f}."
    return f"It agrees with people on {found['judge']:.0%} of the pairs; the best baseline ({best}) on {others[best]:.0%}."


def _value(report: Mapping[str, Any], name: str) -> float | None:
    return number(mapping(report.get("metrics")).get(name))


def _metric(report: Mapping[str, Any], name: str) -> Cell:
    value = _value(report, name)
    if value is None:
        return Cell(value="–" if name not in mapping(report.get("metrics")) else "undefined")
    bounds = mapping(report.get("intervals")).get(name)
    return Cell(value=f"{value:.3f}", bounds=f"{bounds[0]:.3f} to {bounds[1]:.3f}" if bounds else "")


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
        up="judge",
        label=f"Scores of people and of the judge for {len(points)} items",
        radii=[2.5] * len(points),
    )


def _calibration(bins: Sequence[Any]) -> Markup:
    listed = [
        tuple(number(mapping(each).get(name)) for name in ("confidence", "accuracy", "count"))
        for each in bins
    ]
    known = [(first, second, count or 0) for first, second, count in listed if None not in (first, second)]
    if not known:
        return Markup()
    axis = Axis(low=0.0, high=1.0, ticks=(0.0, 0.25, 0.5, 0.75, 1.0))
    most = max(count for _, _, count in known) or 1
    return _square(
        [(float(first or 0), float(second or 0)) for first, second, _ in known],
        axis,
        across="confidence",
        up="right verdicts",
        label=f"Accuracy over confidence in {len(known)} bins; a larger dot is more items",
        radii=[3 + 6 * (count / most) ** 0.5 for _, _, count in known],
    )


def _square(
    points: Sequence[tuple[float, float]],
    axis: Axis,
    *,
    across: str,
    up: str,
    label: str,
    radii: Sequence[float],
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
            _percent(axis.fraction(first)), _percent(1 - axis.fraction(second)), f"{radius:.1f}"
        )
        for (first, second), radius in zip(points, radii, strict=True)
    ]
    return Markup(
        '<svg class="plot" role="img" aria-label="{}"><g class="grid" aria-hidden="true">{}'
        '<text class="down" x="100%" y="100%" dy="36">{} →</text><text x="0" dx="-30" y="0" dy="-12">↑ {}</text></g>'
        '<g class="marks"><line x1="0" y1="100%" x2="100%" y2="0"/></g><g class="dots seen c2">{}</g></svg>'
    ).format(label, Markup("").join(lines), across, up, Markup("").join(circles))


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}%"


def _worst(row: Mapping[str, Any]) -> Worst:
    answer = row.get("answer") or f"A: {row.get('answer_a', '')}\nB: {row.get('answer_b', '')}"
    return Worst(
        task=_cut(row.get("task")),
        reference=_cut(row.get("reference")),
        answer=_cut(answer),
        expected=_said(row.get("expected")),
        predicted=_said(row.get("predicted")),
        feedback=_cut(row.get("text") or row.get("feedback")),
    )


def _said(verdict: Any) -> str:
    if verdict is None:
        return "unreadable"
    return f"{verdict:.1f}" if isinstance(verdict, float) else str(verdict)


def _cut(text: Any) -> str:
    said = str(text or "")
    return said if len(said) <= MOST_CHARACTERS else f"{said[:MOST_CHARACTERS]}…"
