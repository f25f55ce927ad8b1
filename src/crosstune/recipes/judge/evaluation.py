"""Compare a judge's verdicts with reference verdicts: metrics with intervals, and trivial baselines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from crosstune.core.intervals import wilson
from crosstune.recipes.judge import metrics
from crosstune.recipes.judge.items import WINNERS, Item, Scale, number_labels, other_winner
from crosstune.recipes.judge.judge import Judgement
from crosstune.recipes.judge.metrics import Places, are_within, confusion_matrix

Report = dict[str, Any]
Metric = Callable[[Places], float]
"""Return the value for the items at these indices."""
UNREADABLE = "unreadable"
FEW_GROUPS = 10
"""Resampling fewer groups than this gives unreliable intervals."""
MOST_WORST = 10
MIN_PAIRS, LENGTH_BIAS = 20, 0.1
"""The minimum number of pairs to measure a length bias on, and the fraction above which it is reported."""
FRACTIONS = ("accuracy", "within_1", "swap_consistency")
CONSTANT, LONGER, SHORTER, UNTRAINED = "constant", "longer answer", "shorter answer", "untrained model"


def evaluate_items(
    items: Sequence[Item],
    found: Sequence[Judgement],
    *,
    scale: Scale,
    intervals: bool = True,
    others: Mapping[str, Sequence[Judgement]] | None = None,
) -> Report:
    """Return the metrics, their 95 % intervals, the confusion matrix, and notes on undefined metrics; and under `baselines` the
    reports of other judges on the same items.

    An unreadable verdict counts as wrong: as the score farthest from the reference score and never within a point of it, or
    as a fourth class.
    """
    is_pair = items[0].is_pair
    computed, confusion = (_compare_winners if is_pair else _compare_scores)(items, found, scale)
    values = {name: float(metric(np.arange(len(items)))) for name, metric in computed.items()}
    report: Report = {
        "kind": "pairs" if is_pair else "scores",
        "num_items": len(items),
        "num_groups": len({item.group for item in items}),
        "num_unreadable": sum(not one.is_parsed for one in found),
        "metrics": values,
        "notes": [*_notes(items, values), *(_length_notes(items, found) if is_pair else ())],
        "confusion": confusion,
    }
    if intervals:
        draws = metrics.bootstrap_draws(len(items), groups=[item.group for item in items])
        found_intervals = metrics.intervals(computed, draws) if len(items) > 1 else {}
        report["intervals"] = _widen(found_intervals, values, num_groups=report["num_groups"])
        if len(items) > 1 and report["num_groups"] < FEW_GROUPS:
            few = f"from {report['num_groups']} group{'s' * (report['num_groups'] != 1)}"
            report["notes"].append(
                f"intervals {few} are unreliable and often too narrow; test on more groups"
            )
    _add_calibration(report, items, found, scale)
    explained = [(item, one) for item, one in zip(items, found, strict=True) if item.critique]
    if any(one.text for _, one in explained):
        rouge = [metrics.rouge_l(item.critique, one.feedback) for item, one in explained]
        values["rouge_l"] = float(np.mean(rouge))
    if others is not None:
        report["baselines"] = {
            name: evaluate_items(items, each, scale=scale) for name, each in others.items()
        }
    return report


def _widen(
    intervals: Mapping[str, list[float]], values: Mapping[str, float], *, num_groups: int
) -> dict[str, list[float]]:
    """Replace intervals without width, since resampling equal verdicts shows no variation: by Wilson's interval over groups
    for a fraction; other metrics have none."""
    found = {name: interval for name, interval in intervals.items() if interval[0] < interval[1]}
    flat = intervals.keys() - found
    return found | {name: list(wilson(values[name], num_groups)) for name in FRACTIONS if name in flat}


def defined_metrics(report: Report) -> dict[str, float]:
    """Return the metrics that are defined, and the fraction of unreadable verdicts."""
    shown = {name: value for name, value in report["metrics"].items() if math.isfinite(value)}
    return shown | {"unreadable": report["num_unreadable"] / report["num_items"]}


def worst_items(items: Sequence[Item], found: Sequence[Judgement]) -> list[int]:
    """Return the indices of the items whose verdicts are farthest from the reference verdicts, the worst first."""

    def distance(place: int) -> tuple[float, float]:
        item, one = items[place], found[place]
        if not one.is_parsed:
            return (math.inf, 0.0)
        if item.is_pair:
            return (float(item.winner != one.winner), one.confidence or 0.0)
        assert item.score is not None and one.score is not None
        return (abs(item.score - one.score), one.confidence or 0.0)

    ordered = sorted(range(len(items)), key=lambda place: (distance(place), -place), reverse=True)
    return [place for place in ordered if distance(place)[0] > 0][:MOST_WORST]


def is_right(item: Item, one: Judgement, scale: Scale) -> bool:
    """Return True for the same winner, or a score at most a point off."""
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
    is_read = np.array([one.score is not None for one in found])
    error, near = scores - expected, is_read & are_within(expected, scores, distance=scale.point)
    columns = np.where(is_read, second, size)
    table = confusion_matrix(first, columns, num_classes=size + 1)

    def qwk(at: Places) -> float:
        counts = confusion_matrix(first[at], second[at], num_classes=size)
        return metrics.cohen_kappa(counts, quadratic=True)

    return {
        "mae": lambda at: np.abs(error[at]).mean(),
        "rmse": lambda at: math.sqrt((error[at] ** 2).mean()),
        "pearson": lambda at: metrics.pearson(expected[at], scores[at]),
        "spearman": lambda at: metrics.spearman(expected[at], scores[at]),
        "kendall": lambda at: metrics.kendall(expected[at], scores[at]),
        "qwk": qwk,
        "within_1": lambda at: near[at].mean(),
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
        return lambda at: metric(confusion_matrix(expected[at], winners[at], num_classes=len(classes)))

    table = confusion_matrix(expected, winners, num_classes=len(classes))
    computed: dict[str, Metric] = {
        "accuracy": counted(metrics.accuracy),
        "macro_f1": counted(metrics.macro_f1),
        "kappa": counted(metrics.cohen_kappa),
        "swap_consistency": lambda at: consistent[at].mean(),
    }
    if any(one.rewards for one in found):  # these do not depend on the order
        del computed["swap_consistency"]
        margins = np.array(
            [
                (one.rewards[0] - one.rewards[1]) * (1 if item.winner == "A" else -1)
                if one.rewards
                else math.nan
                for item, one in zip(items, found, strict=True)
            ]
        )
        known = np.isfinite(margins)
        computed["margin"] = lambda at: margins[at][known[at]].mean() if known[at].any() else math.nan
    return computed, {"labels": classes, "counts": table.tolist()}


def _notes(items: Sequence[Item], values: Mapping[str, float]) -> list[str]:
    """Explain the undefined metrics."""
    undefined = [name for name, value in values.items() if not math.isfinite(value)]
    notes = list[str]()
    if "swap_consistency" in undefined:  # not a matter of labels
        undefined.remove("swap_consistency")
        notes.append("swap_consistency undefined: pairs were not judged in both orders")
    if undefined:
        labels = {item.winner if item.is_pair else item.score for item in items}
        same_label = f"every item has the same label, {labels.pop()}" if len(labels) == 1 else ""
        notes.append(f"{', '.join(undefined)} undefined: {same_label or 'every verdict is the same'}")
    return notes


def _length_notes(items: Sequence[Item], found: Sequence[Judgement]) -> list[str]:
    """Warn if the judge chooses the longer answer more often than the labels do."""
    rows = [
        (_longer(item), item.winner, one.winner)
        for item, one in zip(items, found, strict=True)
        if {_longer(item), item.winner, one.winner} <= {"A", "B"}
    ]
    if len(rows) < MIN_PAIRS:
        return []
    longer, *winners = map(np.array, zip(*rows, strict=True))
    labeled, chosen = (side == longer for side in winners)
    if chosen.mean() - labeled.mean() <= LENGTH_BIAS:
        return []
    right = labeled == chosen
    parts = [
        f"{right[which].mean():.0%} right where the better answer is the {name} one"
        for which, name in ((labeled, "longer"), (~labeled, "shorter"))
        if which.any()
    ]
    return [
        f"length bias: it prefers the longer answer in {chosen.mean():.0%} of the pairs, the labels in "
        f"{labeled.mean():.0%}; {', '.join(parts)}"
    ]


def _add_calibration(report: Report, items: Sequence[Item], found: Sequence[Judgement], scale: Scale) -> None:
    rows = [(item, one) for item, one in zip(items, found, strict=True) if one.confidence is not None]
    if rows:
        correct = [is_right(item, one, scale) for item, one in rows]
        bins = metrics.reliability([one.confidence or 0.0 for _, one in rows], correct)
        report["metrics"]["ece"] = metrics.expected_calibration_error(bins)
        report["calibration"] = bins


def _longer(item: Item) -> str:
    first, second = map(len, item.answers)
    return "tie" if first == second else "A" if first > second else "B"


def baseline_verdicts(
    items: Sequence[Item], *, scale: Scale, train: Sequence[Item] = ()
) -> dict[str, list[Judgement]]:
    """Return the verdicts of two trivial judges, fitted on the training items, or else on the test items.

    One is constant: the mean score, or the most frequent winner. The other uses only the answers' lengths: a linear fit
    for scores; for pairs the longer answer, or the shorter if it is more often better.
    """
    known = [item for item in train if item.is_labeled] or list(items)
    if items[0].is_pair:
        winners = [item.winner for item in known]
        constant = Judgement(winner=max(WINNERS, key=winners.count))
        found = [(_longer(item), item.winner) for item in known if item.winner != "tie"]
        lead = sum((longer == winner) - (longer == other_winner(winner)) for longer, winner in found)
        guesses = [_longer(item) if lead >= 0 else other_winner(_longer(item)) for item in items]
        by_length = [Judgement(winner=guess) for guess in guesses]
        return {CONSTANT: [constant] * len(items), LONGER if lead >= 0 else SHORTER: by_length}
    scores = np.array([item.score for item in known], dtype=np.float64)
    lengths, asked = (
        np.array([len(item.answers[0]) for item in each], np.float64) for each in (known, items)
    )
    away = lengths - lengths.mean()
    slope = (away * (scores - scores.mean())).sum() / ((away**2).sum() or 1.0)
    fitted = np.clip(scores.mean() + slope * (asked - lengths.mean()), scale.low, scale.high)
    constant = Judgement(score=float(scores.mean()))
    return {
        CONSTANT: [constant] * len(items),
        LONGER: [Judgement(score=float(guess)) for guess in fitted],
    }
