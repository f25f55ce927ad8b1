"""Compare a judge's verdicts with people's: metrics with intervals, beside baselines that know nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.recipes.judge.items import WINNERS, Item
from crosstune.recipes.judge.judge import Judgement
from crosstune.recipes.judge.metrics.agreement import accuracy, cohen_kappa, confusion, count_pairs, macro_f1
from crosstune.recipes.judge.metrics.bootstrap import interval
from crosstune.recipes.judge.metrics.calibration import expected_calibration_error, reliability
from crosstune.recipes.judge.metrics.correlation import (
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
    everything = np.arange(len(items))
    metrics = {name: compared[name](everything) for name in names}
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
        groups = [item.group for item in items]
        made = {name: interval(compared[name], len(items), groups=groups) for name in names}
        report["intervals"] = {name: found.to_json() for name, found in made.items() if found is not None}
    _add_calibration(report, items, found, scale)
    _add_feedback(report, items, found)
    return report


def headline(report: Report) -> dict[str, float]:
    """Return the metrics of an evaluation during training; those that are undefined are left out."""
    shown = {name: value for name, value in report["metrics"].items() if math.isfinite(value)}
    return shown | {"unreadable": report["num_unreadable"] / report["num_items"]}


def baselines(
    items: Sequence[Item], *, scale: Scale, train: Sequence[Item] = (), intervals: bool = True
) -> dict[str, Report]:
    """Return the reports of judges that know nothing: a constant, and the length of the answer.

    They are fitted on the training items, or without those on the items themselves, which favours them.
    """
    known = [item for item in train if item.is_labelled] or list(items)
    guesses = {
        "constant": _constant(items, known),
        "longer answer": _longer(items, known, scale),
    }
    return {
        name: evaluate_items(items, found, scale=scale, intervals=intervals)
        for name, found in guesses.items()
    }


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


Metric = Callable[[NDArray[np.int64]], float]


def _score_metrics(items: Sequence[Item], found: Sequence[Judgement], scale: Scale) -> Mapping[str, Metric]:
    expected = np.array([item.score for item in items], dtype=np.float64)
    scores = _scores(expected, found, scale)
    values = np.array(number_labels(scale).values)
    first, second = (np.abs(values[None] - each[:, None]).argmin(axis=1) for each in (expected, scores))

    def kappa(rows: NDArray[np.int64]) -> float:
        return cohen_kappa(count_pairs(first[rows], second[rows], num_classes=len(values)), quadratic=True)

    return {
        "mae": lambda rows: mean_absolute_error(expected[rows], scores[rows]),
        "rmse": lambda rows: root_mean_squared_error(expected[rows], scores[rows]),
        "pearson": lambda rows: pearson(expected[rows], scores[rows]),
        "spearman": lambda rows: spearman(expected[rows], scores[rows]),
        "kendall": lambda rows: kendall(expected[rows], scores[rows]),
        "qwk": kappa,
        "within_1": lambda rows: share_within(expected[rows], scores[rows], distance=scale.point),
    }


def _scores(expected: NDArray[np.float64], found: Sequence[Judgement], scale: Scale) -> NDArray[np.float64]:
    farthest = np.where(expected - scale.low > scale.high - expected, scale.low, scale.high)
    return np.array(
        [one.score if one.score is not None else far for one, far in zip(found, farthest, strict=True)]
    )


def _pair_metrics(items: Sequence[Item], found: Sequence[Judgement], scale: Scale) -> Mapping[str, Metric]:
    classes = [*WINNERS, UNREADABLE]
    expected = np.array([classes.index(item.winner or "") for item in items])
    winners = np.array([classes.index(one.winner or UNREADABLE) for one in found])
    consistent = np.array([bool(one.consistent) for one in found], dtype=np.float64)
    asked = any(one.consistent is not None for one in found)

    def counted(rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return count_pairs(expected[rows], winners[rows], num_classes=len(classes))

    return {
        "accuracy": lambda rows: accuracy(counted(rows)),
        "macro_f1": lambda rows: macro_f1(counted(rows)),
        "kappa": lambda rows: cohen_kappa(counted(rows)),
        "swap_consistency": lambda rows: float(consistent[rows].mean()) if asked else math.nan,
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
    return one.score is not None and abs(one.score - (item.score or 0.0)) <= scale.point * (1 + 1e-9)


def _add_feedback(report: Report, items: Sequence[Item], found: Sequence[Judgement]) -> None:
    """Add ROUGE-L of the generated feedback, for items where people gave some."""
    rows = [(item, one) for item, one in zip(items, found, strict=True) if item.critique and one.text]
    if rows:
        report["metrics"]["rouge_l"] = float(
            np.mean([rouge_l(item.critique, one.feedback) for item, one in rows])
        )


def _constant(items: Sequence[Item], known: Sequence[Item]) -> list[Judgement]:
    """Always say the mean score, or the most frequent winner."""
    if items[0].is_pair:
        winners = [item.winner for item in known]
        most = max(WINNERS, key=winners.count)
        return [Judgement(winner=most, consistent=None)] * len(items)
    mean = float(np.mean([item.score for item in known if item.score is not None]))
    return [Judgement(score=mean)] * len(items)


def _longer(items: Sequence[Item], known: Sequence[Item], scale: Scale) -> list[Judgement]:
    """Prefer the longer answer; for scores, the line that fits the length of the answers best."""
    if items[0].is_pair:
        return [Judgement(winner=_longer_of(item.answers)) for item in items]
    lengths = np.array([len(item.answers[0]) for item in known], dtype=np.float64)
    scores = np.array([item.score for item in known], dtype=np.float64)
    spread = float(((lengths - lengths.mean()) ** 2).sum())
    slope = float(((lengths - lengths.mean()) * (scores - scores.mean())).sum()) / spread if spread else 0.0
    guesses = [scores.mean() + slope * (len(item.answers[0]) - lengths.mean()) for item in items]
    return [Judgement(score=float(np.clip(guess, scale.low, scale.high))) for guess in guesses]


def _longer_of(answers: Sequence[str]) -> str:
    first, second = map(len, answers)
    return "tie" if first == second else "A" if first > second else "B"
