"""Compare a judge's verdicts with human verdicts: metrics with intervals, and trivial baselines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from crosstune.recipes.judge import metrics
from crosstune.recipes.judge.items import WINNERS, Item, Scale, number_labels
from crosstune.recipes.judge.judge import Judgement
from crosstune.recipes.judge.metrics import Floats, are_within

Report = dict[str, Any]
Metric = Callable[[Floats], Floats]
"""Return the value in each bootstrap draw, from the weights of the items."""
UNREADABLE = "unreadable"
CONSTANT, LONGER, UNTRAINED = "constant", "longer answer", "untrained model"


def evaluate_items(
    items: Sequence[Item], found: Sequence[Judgement], *, scale: Scale, intervals: bool = True
) -> Report:
    """Return the metrics, their 95 % intervals, the confusion matrix, and notes on undefined metrics.

    An unreadable verdict counts as wrong: as the score farthest from the human score, or as a fourth class.
    """
    is_pair = items[0].is_pair
    computed, confusion = (_compare_winners if is_pair else _compare_scores)(items, found, scale)
    once = metrics.all_once(len(items))
    values = {name: float(metric(once)[0]) for name, metric in computed.items()}
    report: Report = {
        "kind": "pairs" if is_pair else "scores",
        "num_items": len(items),
        "num_groups": len({item.group for item in items}),
        "num_unreadable": sum(not one.is_parsed for one in found),
        "metrics": values,
        "notes": _notes(items, values),
        "confusion": confusion,
    }
    if intervals:
        weights = metrics.draw_weights(len(items), groups=[item.group for item in items])
        bounds = {name: metrics.interval(metric, weights) for name, metric in computed.items()}
        report["intervals"] = {name: each for name, each in bounds.items() if each and len(items) > 1}
    _add_calibration(report, items, found, scale)
    explained = [(item, one) for item, one in zip(items, found, strict=True) if item.critique and one.text]
    if explained:
        rouge = [metrics.rouge_l(item.critique, one.feedback) for item, one in explained]
        values["rouge_l"] = float(np.mean(rouge))
    return report


def defined_metrics(report: Report) -> dict[str, float]:
    """Return the metrics that are defined, and the fraction of unreadable verdicts."""
    shown = {name: value for name, value in report["metrics"].items() if math.isfinite(value)}
    return shown | {"unreadable": report["num_unreadable"] / report["num_items"]}


def evaluate_with_baselines(
    items: Sequence[Item],
    found: Sequence[Judgement],
    *,
    scale: Scale,
    others: Mapping[str, Sequence[Judgement]],
) -> Report:
    """Return the report of a judge, and under `baselines` the reports of other judges of the same items."""
    report = evaluate_items(items, found, scale=scale)
    report["baselines"] = {name: evaluate_items(items, each, scale=scale) for name, each in others.items()}
    return report


def worst_items(items: Sequence[Item], found: Sequence[Judgement], *, most: int = 10) -> list[int]:
    """Return the indices of the items whose verdicts are farthest from the human ones, the worst first."""

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


def is_right(item: Item, one: Judgement, scale: Scale) -> bool:
    """Return whether a verdict is right: the same winner, or a score at most a point off."""
    if item.is_pair:
        return item.winner == one.winner
    assert item.score is not None
    return one.score is not None and bool(are_within(item.score, one.score, distance=scale.point))


def _compare_scores(
    items: Sequence[Item], found: Sequence[Judgement], scale: Scale
) -> tuple[dict[str, Metric], dict[str, Any]]:
    """Return the metrics of scores, and their confusion table."""
    expected = np.array([item.score for item in items], dtype=np.float64)
    farthest = np.where(expected - scale.low > scale.high - expected, scale.low, scale.high)
    scores = np.array(
        [one.score if one.score is not None else far for one, far in zip(found, farthest, strict=True)]
    )
    labels = number_labels(scale)
    values, size = np.array(labels.values), len(labels)
    first, second = (np.abs(values[None] - each[:, None]).argmin(axis=1) for each in (expected, scores))
    error, near = scores - expected, are_within(expected, scores, distance=scale.point)
    kappa = partial(metrics.cohen_kappa, quadratic=True)
    columns = np.where([one.score is None for one in found], size, second)
    table = metrics.confusion_matrix(first, columns, num_classes=size + 1)
    return {
        "mae": lambda w: metrics.mean(w, np.abs(error)),
        "rmse": lambda w: np.sqrt(metrics.mean(w, error**2)),
        "pearson": lambda w: metrics.pearson(w, expected, scores),
        "spearman": lambda w: metrics.spearman(w, expected, scores),
        "kendall": lambda w: metrics.kendall(w, expected, scores),
        "qwk": lambda w: metrics.of_counts(w, first, second, kappa, num_classes=size),
        "within_1": lambda w: metrics.mean(w, near.astype(np.float64)),
    }, {"labels": [*labels.texts, UNREADABLE], "counts": table.tolist()}


def _compare_winners(
    items: Sequence[Item], found: Sequence[Judgement], scale: Scale
) -> tuple[dict[str, Metric], dict[str, Any]]:
    """Return the metrics of winners, and their confusion table."""
    classes = [*WINNERS, UNREADABLE]
    expected = np.array([classes.index(item.winner or "") for item in items])
    winners = np.array([classes.index(one.winner or UNREADABLE) for one in found])
    asked = any(one.consistent is not None for one in found)
    consistent = np.array([float(bool(one.consistent)) if asked else math.nan for one in found])

    def counted(metric: Callable[[metrics.Counts], float]) -> Metric:
        return lambda w: metrics.of_counts(w, expected, winners, metric, num_classes=len(classes))

    table = metrics.confusion_matrix(expected, winners, num_classes=len(classes))
    return {
        "accuracy": counted(metrics.accuracy),
        "macro_f1": counted(metrics.macro_f1),
        "kappa": counted(metrics.cohen_kappa),
        "swap_consistency": lambda w: metrics.mean(w, consistent),
    }, {"labels": classes, "counts": table.tolist()}


def _notes(items: Sequence[Item], values: Mapping[str, float]) -> list[str]:
    undefined = [name for name, value in values.items() if not math.isfinite(value)]
    if "swap_consistency" in undefined:  # not a matter of labels
        undefined.remove("swap_consistency")
        notes = ["swap_consistency undefined: pairs were not judged in both orders"]
    else:
        notes = []
    if not undefined:
        return notes
    labels = {item.winner if item.is_pair else item.score for item in items}
    same_label = f"every item has the same label, {labels.pop()}" if len(labels) == 1 else ""
    why = same_label or "every verdict is the same"
    return [*notes, f"{', '.join(undefined)} undefined: {why}"]


def _add_calibration(report: Report, items: Sequence[Item], found: Sequence[Judgement], scale: Scale) -> None:
    rows = [(item, one) for item, one in zip(items, found, strict=True) if one.confidence is not None]
    if rows:
        confidence = [one.confidence or 0.0 for _, one in rows]
        correct = [is_right(item, one, scale) for item, one in rows]
        report["metrics"]["ece"] = metrics.expected_calibration_error(confidence, correct)
        report["calibration"] = metrics.reliability(confidence, correct)


def baseline_verdicts(
    items: Sequence[Item], *, scale: Scale, train: Sequence[Item] = ()
) -> dict[str, list[Judgement]]:
    """Return the verdicts of two trivial judges: a constant, and one that uses only the answer's length.

    They are fitted on the training items. Without training items they are fitted on the test items and look too good.
    """
    known = [item for item in train if item.is_labelled] or list(items)
    return {CONSTANT: _constant(items, known), LONGER: _longer(items, known, scale)}


def _constant(items: Sequence[Item], known: Sequence[Item]) -> list[Judgement]:
    """Return the mean score, or the most frequent winner, for every item."""
    if items[0].is_pair:
        winners = [item.winner for item in known]
        return [Judgement(winner=max(WINNERS, key=winners.count))] * len(items)
    mean = float(np.mean([item.score for item in known if item.score is not None]))
    return [Judgement(score=mean)] * len(items)


def _longer(items: Sequence[Item], known: Sequence[Item], scale: Scale) -> list[Judgement]:
    """Prefer the longer answer; for scores, fit a line to the length of the answers."""
    if items[0].is_pair:
        lengths = [tuple(map(len, item.answers)) for item in items]
        return [Judgement(winner="tie" if a == b else "A" if a > b else "B") for a, b in lengths]
    sizes = np.array([len(item.answers[0]) for item in known], dtype=np.float64)
    scores = np.array([item.score for item in known], dtype=np.float64)
    spread = float(((sizes - sizes.mean()) ** 2).sum())
    slope = float(((sizes - sizes.mean()) * (scores - scores.mean())).sum()) / spread if spread else 0.0
    guesses = [scores.mean() + slope * (len(item.answers[0]) - sizes.mean()) for item in items]
    return [Judgement(score=float(np.clip(guess, scale.low, scale.high))) for guess in guesses]
