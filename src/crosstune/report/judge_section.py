"""Collect the test of a judge: metrics and baselines, scatter, confusion, calibration, and the worst disagreements."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstune.files.json_files import parse_json, read_json
from crosstune.files.plain_files import UnreadableFile, read_plain_text
from crosstune.files.run_record import JUDGE_METRICS, JUDGE_PREDICTIONS
from crosstune.report.charts import Chart, Series
from crosstune.report.files import listed, mapping, number
from crosstune.report.formatting import display_of

TITLES = {
    "mae": "MAE",
    "rmse": "RMSE",
    "pearson": "Pearson",
    "spearman": "Spearman",
    "kendall": "Kendall",
    "qwk": "QWK",
    "within_1": "within 1",
    "accuracy": "accuracy",
    "macro_f1": "macro-F1",
    "kappa": "kappa",
    "swap_consistency": "swap consistency",
    "margin": "mean margin",
    "ece": "calibration error",
    "rouge_l": "ROUGE-L",
}
"""Metric -> title, in the order of the table."""
MAX_POINTS = 2000
MAX_CHARACTERS = 400
_LIMIT_BYTES = 256 << 20


def collect_judge_test(folder: Path) -> dict[str, Any] | None:
    """Return the test of the judge in a run folder; None if there is none."""
    report = read_json(folder / JUDGE_METRICS)
    if not report:
        return None
    columns, rows = metric_table(report)
    labels, confusion = _confusion(mapping(report.get("confusion")))
    return {
        "lead": compare_with_best(report),
        "columns": columns,
        "rows": rows,
        "notes": [str(note) for note in listed(report.get("notes"))],
        "num_items": int(number(report.get("num_items")) or 0),
        "charts": [chart for chart in (_scatter(folder), _calibration(report)) if chart is not None],
        "labels": labels,
        "confusion": confusion,
        "worst": [_worst(mapping(row)) for row in listed(report.get("worst"))],
    }


def metric_table(report: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, list[tuple[str, str]]]]]:
    """Return the columns, the judge and each baseline, and a row for each metric: its title, and values with intervals."""
    columns = {"judge": report} | {
        name: mapping(each) for name, each in mapping(report.get("baselines")).items()
    }
    known = {name for each in columns.values() for name in mapping(each.get("metrics"))}
    rows = [
        (
            f"{title} {'↓' if _is_lower_better(name) else '↑'}",
            [_cell(each, name) for each in columns.values()],
        )
        for name, title in TITLES.items()
        if name in known
    ]
    unreadable = [(str(each.get("num_unreadable", "–")), "") for each in columns.values()]
    return list(columns), [*rows, ("unreadable verdicts", unreadable)]


def compare_with_best(report: Mapping[str, Any]) -> str:
    """Compare the judge with its best baseline in the main metric; return an empty string without baselines."""
    main = "mae" if _value(report, "mae") is not None else "accuracy"
    others = mapping(report.get("baselines")).items()
    found = {name: value for name, each in others if (value := _value(mapping(each), main)) is not None}
    own = _value(report, main)
    if own is None or not found:
        return ""
    best = (min if _is_lower_better(main) else max)(found, key=found.__getitem__)
    loses = own >= found[best] if _is_lower_better(main) else own <= found[best]
    verdict = " The judge is no better than this baseline." if loses else ""
    if main == "mae":
        return (
            f"Its scores differ from the reference scores by {own:.2f} points on average; the best baseline ({best}) "
            f"differs by {found[best]:.2f}.{verdict}"
        )
    return f"It agrees with the labels on {own:.0%} of the pairs; the best baseline ({best}) on {found[best]:.0%}.{verdict}"


def _is_lower_better(name: str) -> bool:
    return display_of(name, []).better < 0


def _value(report: Mapping[str, Any], name: str) -> float | None:
    return number(mapping(report.get("metrics")).get(name))


def _cell(report: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Return a metric and its interval as text."""
    value = _value(report, name)
    if value is None:
        return "undefined" if name in mapping(report.get("metrics")) else "–", ""
    bounds = [number(bound) for bound in listed(mapping(report.get("intervals")).get(name))]
    return f"{value:.3f}", " to ".join(f"{bound:.3f}" for bound in bounds if bound is not None)


def _confusion(table: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, list[tuple[int, int]]]]]:
    """Return the labels in use, and for each expected label the predicted counts and their fractions in fifths."""
    labels = [str(label) for label in listed(table.get("labels"))]
    counts = [[int(number(count) or 0) for count in listed(row)] for row in listed(table.get("counts"))]
    if {len(counts), *map(len, counts)} != {len(labels)}:
        raise ValueError("the confusion table is not square")
    used = [place for place, row in enumerate(counts) if any(row) or any(each[place] for each in counts)]
    rows = [
        (labels[place], [(row[at], round(5 * row[at] / sum(row))) for at in used])
        for place, row in enumerate(counts)
        if any(row)
    ]
    return [labels[place] for place in used], rows


def _scatter(folder: Path) -> Chart | None:
    """Return a scatter plot of predicted and expected scores; None for pairwise verdicts."""
    try:
        rows = parse_json(read_plain_text(folder / JUDGE_PREDICTIONS, limit=_LIMIT_BYTES))
    except (UnreadableFile, ValueError):
        return None
    pairs = [
        (number(row.get("expected")), number(row.get("predicted"))) for row in map(mapping, listed(rows))
    ]
    known = [(first, second) for first, second in pairs if first is not None and second is not None]
    points = known[:: max(1, -(-len(known) // MAX_POINTS))]
    return _square(
        "Scores: judge against labels",
        points,
        [2.5] * len(points),
        x_label="labels",
        y_label="judge",
        description=f"Reference and judge scores for {len(points)} items",
    )


def _calibration(report: Mapping[str, Any]) -> Chart | None:
    bins = [
        [number(mapping(each).get(name)) for name in ("confidence", "accuracy", "count")]
        for each in listed(report.get("calibration"))
    ]
    known = [
        (first, second, count or 0.0) for first, second, count in bins if first is not None is not second
    ]
    most = max((count for _, _, count in known), default=0.0) or 1.0
    return _square(
        "Calibration: correct verdicts over confidence",
        [(first, second) for first, second, _ in known],
        [3 + 6 * (max(0.0, count) / most) ** 0.5 for _, _, count in known],
        span=(0.0, 1.0),
        x_label="confidence",
        y_label="correct verdicts",
        description=f"Accuracy over confidence in {len(known)} bins; a larger dot is more items",
    )


def _square(title: str, points: list[tuple[float, float]], radii: list[float], **more: Any) -> Chart | None:
    series = [Series(label="items", points=points, look="scatter", color=2, radii=radii)]
    if not points:
        return None
    return Chart(title=title, series=series, shape="square", from_zero=True, shows_figures=False, **more)


def _worst(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the verdicts and the shortened texts of a disagreement."""
    found = {"task": row.get("task"), "reference": row.get("reference")}
    found["answer"] = row.get("answer") or f"A: {row.get('answer_a', '')}\nB: {row.get('answer_b', '')}"
    found["feedback"] = row.get("text") or row.get("feedback")
    for name in ("expected", "predicted"):
        verdict = "unreadable" if row.get(name) is None else row[name]
        found[name] = f"{verdict:.1f}" if isinstance(verdict, float) else verdict
    texts = {name: "" if text is None else str(text) for name, text in found.items()}
    return {name: text[:MAX_CHARACTERS] + "…" * (len(text) > MAX_CHARACTERS) for name, text in texts.items()}
