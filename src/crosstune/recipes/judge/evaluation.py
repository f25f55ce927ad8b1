"""Compare a judge's verdicts with people's: metrics with intervals, beside baselines that know nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crosstune.recipes.judge.items import WINNERS, Item
from crosstune.recipes.judge.judge import Judgement
from crosstune.recipes.judge.metrics import resampled
from crosstune.recipes.judge.metrics.agreement import (
    Counts,
    accuracy,
    cohen_kappa,
    confusion,
    count_pairs,
    macro_f1,
)
from crosstune.recipes.judge.metrics.bootstrap import draw_weights, interval
from crosstune.recipes.judge.metrics.calibration import expected_calibration_error, reliability
from crosstune.recipes.judge.metrics.correlation import (
    Floats,
    are_within,
    kendall,
    mean_absolute_error,
    pearson,
    root_mean_squared_error,
    share_within,
    spearman,
)
from crosstune.recipes.judge.metrics.rouge import rouge_l
from crosstune.recipes.judge.scale import Scale, number_labels

Report = dict[str, Any]
SCORE_METRICS = ("mae", "rmse", "pearson", "spearman", "kendall", "qwk", "within_1")
PAIR_METRICS = ("accuracy", "macro_f1", "kappa", "swap_consistency")
UNREADABLE = "unreadable"


def evaluate_items(
    items: Sequence[Item], found: Sequence[Judgement], *, scale: Scale, intervals: bool = True
) -> Report:
    """Return the metrics, their 95 % intervals, the confusion of labels, and notes on what is undefined.

    An unreadable verdict counts as wrong: as the score farthest from the right one, or as a winner of its own.
    """
    compute = _pair_metrics if items[0].is_pair else _score_metrics
    names = PAIR_METRICS if items[0].is_pair else SCORE_METRICS
    compared = compute(items, found, scale)
    metrics = {name: compared[name].value for name in names}
    report: Report = {
        "kind": "pairs" if items[0].is_pair else "scores",
        "num_items": len(items),
        "num_groups": len({item.group for item in items}),
        "num_unreadable": sum(not one.is_parsed for one in found),
        "metrics": metrics,
        "notes": _notes(items, metrics),
        "confusion": _confusion_table(items, found, scale),
    }
    if intervals:
        weights = draw_weights(len(items), groups=[item.group for item in items])
        made = {name: interval(compared[name].resample(weights)) for name in names} if len(items) > 1 else {}
        report["intervals"] = {name: found.to_json() for name, found in made.items() if found is not None}
    _add_calibration(report, items, found, scale)
    _add_feedback(report, items, found)
    return report


def headline(report: Report) -> dict[str, float]:
    """Return the metrics of an evaluation during training; those that are undefined are left out."""
    shown = {name: value for name, value in report["metrics"].items() if math.isfinite(value)}
    return shown | {"unreadable": report["num_unreadable"] / report["num_items"]}


def evaluate_beside(
    items: Sequence[Item],
    found: Sequence[Judgement],
    *,
    scale: Scale,
    others: Mapping[str, Sequence[Judgement]],
) -> Report:
    """Return the report of a judge, with those of other judges of the same items under `baselines`."""
    report = evaluate_items(items, found, scale=scale)
    report["baselines"] = {name: evaluate_items(items, each, scale=scale) for name, each in others.items()}
    return report


def worst_items(items: Sequence[Item], found: Sequence[Judgement], *, most: int = 10) -> list[int]:
    """Return the places of the items whose verdicts are farthest from people's, the worst first."""

    def distance(place: int) -> tuple[float, float]:
        item, one = items[place], found[place]
        if not one.is_parsed:
            return (math.inf, 0.0)
        if item.is_pair:
            return (float(item.winner != one.winner), one.confidence or 0.0)
        assert item.score is not None and one.score is not None
        return (abs(item.score - one.score), one.confidence or 0.0)

    ordered = sorted(range(len(items)), key=lambda place: (distance(place), -place), reverse=True)
    return [place for place in ordered if distance(place)[0] > 0][:most]


@dataclass(frozen=True, kw_only=True)
class Metric:
    value: float
    resample: Callable[[Floats], Floats]
    """Return the value in each draw of the bootstrap, from how often each item is drawn."""


def _score_metrics(items: Sequence[Item], found: Sequence[Judgement], scale: Scale) -> Mapping[str, Metric]:
    expected = np.array([item.score for item in items], dtype=np.float64)
    scores = _scores(expected, found, scale)
    values = np.array(number_labels(scale).values)
    size = len(values)
    first, second = (np.abs(values[None] - each[:, None]).argmin(axis=1) for each in (expected, scores))
    error = scores - expected
    near = are_within(expected, scores, distance=scale.point).astype(np.float64)

    def kappa(counts: Counts) -> float:
        return cohen_kappa(counts, quadratic=True)

    return {
        "mae": Metric(
            value=mean_absolute_error(expected, scores), resample=lambda w: resampled.mean(w, np.abs(error))
        ),
        "rmse": Metric(
            value=root_mean_squared_error(expected, scores),
            resample=lambda w: np.sqrt(resampled.mean(w, error**2)),
        ),
        "pearson": Metric(
            value=pearson(expected, scores), resample=lambda w: resampled.pearson(w, expected, scores)
        ),
        "spearman": Metric(
            value=spearman(expected, scores), resample=lambda w: resampled.spearman(w, expected, scores)
        ),
        "kendall": Metric(
            value=kendall(expected, scores), resample=lambda w: resampled.kendall(w, expected, scores)
        ),
        "qwk": Metric(
            value=kappa(count_pairs(first, second, num_classes=size)),
            resample=lambda w: resampled.of_counts(w, first, second, kappa, num_classes=size),
        ),
        "within_1": Metric(
            value=share_within(expected, scores, distance=scale.point),
            resample=lambda w: resampled.mean(w, near),
        ),
    }


def _scores(expected: Floats, found: Sequence[Judgement], scale: Scale) -> Floats:
    farthest = np.where(expected - scale.low > scale.high - expected, scale.low, scale.high)
    return np.array(
        [one.score if one.score is not None else far for one, far in zip(found, farthest, strict=True)]
    )


def _pair_metrics(items: Sequence[Item], found: Sequence[Judgement], scale: Scale) -> Mapping[str, Metric]:
    classes = [*WINNERS, UNREADABLE]
    expected = np.array([classes.index(item.winner or "") for item in items])
    winners = np.array([classes.index(one.winner or UNREADABLE) for one in found])
    asked = any(one.consistent is not None for one in found)
    consistent = np.array([float(bool(one.consistent)) if asked else math.nan for one in found])

    counts = count_pairs(expected, winners, num_classes=len(classes))

    def metric(compute: Callable[[Counts], float]) -> Metric:
        return Metric(
            value=compute(counts),
            resample=lambda w: resampled.of_counts(w, expected, winners, compute, num_classes=len(classes)),
        )

    return {
        "accuracy": metric(accuracy),
        "macro_f1": metric(macro_f1),
        "kappa": metric(cohen_kappa),
        "swap_consistency": Metric(
            value=float(consistent.mean()), resample=lambda w: resampled.mean(w, consistent)
        ),
    }


def _notes(items: Sequence[Item], metrics: Mapping[str, float]) -> list[str]:
    undefined = [name for name, value in metrics.items() if not math.isfinite(value)]
    if not undefined:
        return []
    labels = {item.winner if item.is_pair else item.score for item in items}
    if len(labels) == 1:
        [only] = labels
        why = f"every item has the same label, {only}"
    elif len(items) < 2:
        why = "there is one item"
    else:
        why = "every verdict is the same"
    return [f"{', '.join(undefined)} undefined: {why}"]


def _confusion_table(items: Sequence[Item], found: Sequence[Judgement], scale: Scale) -> dict[str, Any]:
    if items[0].is_pair:
        labels = [*WINNERS, UNREADABLE]
        counts = confusion(
            [item.winner for item in items], [one.winner or UNREADABLE for one in found], classes=labels
        )
    else:
        known = number_labels(scale)
        labels = [*known.texts, UNREADABLE]
        counts = confusion(
            [_nearest(known.values, item.score) for item in items],
            [len(known) if one.score is None else _nearest(known.values, one.score) for one in found],
            classes=range(len(labels)),
        )
    return {"labels": labels, "counts": counts.tolist()}


def _nearest(values: Sequence[float], score: float | None) -> int:
    assert score is not None
    return int(np.abs(np.array(values) - score).argmin())


def _add_calibration(report: Report, items: Sequence[Item], found: Sequence[Judgement], scale: Scale) -> None:
    rows = [(item, one) for item, one in zip(items, found, strict=True) if one.confidence is not None]
    if not rows:
        return
    confidence = [one.confidence or 0.0 for _, one in rows]
    correct = [is_right(item, one, scale) for item, one in rows]
    report["metrics"]["ece"] = expected_calibration_error(confidence, correct)
    report["calibration"] = [vars(each) | {} for each in reliability(confidence, correct)]


def is_right(item: Item, one: Judgement, scale: Scale) -> bool:
    """Return whether a verdict is right: the same winner, or a score at most a point off."""
    if item.is_pair:
        return item.winner == one.winner
    assert item.score is not None
    return one.score is not None and bool(are_within(item.score, one.score, distance=scale.point))


def _add_feedback(report: Report, items: Sequence[Item], found: Sequence[Judgement]) -> None:
    """Add ROUGE-L of the generated feedback, for items where people gave some."""
    rows = [(item, one) for item, one in zip(items, found, strict=True) if item.critique and one.text]
    if rows:
        report["metrics"]["rouge_l"] = float(
            np.mean([rouge_l(item.critique, one.feedback) for item, one in rows])
        )
