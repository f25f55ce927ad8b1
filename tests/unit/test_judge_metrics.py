"""The judge's metrics against scipy and scikit-learn: random inputs, ties, degenerate cases."""

from __future__ import annotations

import math
import tracemalloc
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
from numpy.typing import NDArray

from crosstune.recipes.judge.evaluation import evaluate_items
from crosstune.recipes.judge.items import Item, Scale
from crosstune.recipes.judge.judge import Judgement
from crosstune.recipes.judge.metrics import (
    accuracy,
    bootstrap_draws,
    cohen_kappa,
    confusion_matrix,
    expected_calibration_error,
    fit_temperature,
    intervals,
    kendall,
    macro_f1,
    pearson,
    reliability,
    rouge_l,
    soften,
    spearman,
)

Floats = NDArray[np.float64]


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def pairs() -> list[tuple[str, Floats, Floats]]:
    draw = np.random.default_rng(7)
    cases = []
    for count in (2, 3, 10, 57, 400):
        first = draw.normal(size=count)
        cases.append((f"continuous {count}", first, first + draw.normal(size=count)))
        grades = draw.integers(0, 11, count).astype(float)
        cases.append((f"ties {count}", grades, np.clip(grades + draw.integers(-3, 4, count), 0, 10)))
    grades, others = np.round(draw.uniform(0, 3, (2, 40)))
    cases += [
        (f"draw {number}", grades[at], others[at])
        for number, at in enumerate(bootstrap_draws(40, num_draws=5))
    ]
    cases += [
        ("same", np.arange(9.0), np.arange(9.0)),
        ("reversed", np.arange(9.0), -np.arange(9.0)),
        ("large offset", 1e8 + draw.normal(size=50), draw.normal(size=50)),
        ("tiny", 1e-160 * draw.normal(size=50), draw.normal(size=50)),
        ("constant", np.ones(5), np.arange(5.0)),
        ("both constant", np.ones(5), np.ones(5)),
        ("one value differs", np.array([1.0, 1, 1, 1, 2]), np.array([3.0, 3, 3, 4, 3])),
    ]
    return cases


@pytest.mark.parametrize(("name", "first", "second"), pairs(), ids=[case[0] for case in pairs()])
def test_correlations_are_scipys(name: str, first: Floats, second: Floats) -> None:
    for ours, theirs in (
        (pearson, scipy.stats.pearsonr),
        (spearman, scipy.stats.spearmanr),
        (kendall, scipy.stats.kendalltau),
    ):
        expected = float(theirs(first, second).statistic)
        error = 1e-9 if name == "large offset" else 1e-12
        assert ours(first, second) == pytest.approx(expected, abs=error, nan_ok=True), ours.__name__


def test_a_series_that_is_constant_up_to_rounding_has_no_correlation() -> None:
    first, second = np.array([0.1 + 0.2, 0.3, 0.3]), np.array([1.0, 2.0, 3.0])
    for metric in (pearson, spearman, kendall):
        assert math.isnan(metric(first, second)) and math.isnan(metric(first[:1], second[:1]))


@pytest.mark.parametrize(("count", "num_classes"), [(5, 2), (40, 3), (300, 11)])
def test_agreement_is_that_of_scikit_learn(count: int, num_classes: int) -> None:
    draw = np.random.default_rng(count)
    for _ in range(5):
        first = draw.integers(0, num_classes, count)
        second = np.where(draw.random(count) < 0.6, first, draw.integers(0, num_classes, count))
        classes = list(range(num_classes))
        counts = confusion_matrix(first, second, num_classes=num_classes)
        assert counts.tolist() == sklearn.metrics.confusion_matrix(first, second, labels=classes).tolist()
        assert accuracy(counts) == pytest.approx(sklearn.metrics.accuracy_score(first, second), abs=1e-12)
        f1 = sklearn.metrics.f1_score(first, second, average="macro")
        assert macro_f1(counts) == pytest.approx(f1, abs=1e-12)
        for quadratic, weights in ((False, None), (True, "quadratic")):
            expected = sklearn.metrics.cohen_kappa_score(first, second, labels=classes, weights=weights)
            found = cohen_kappa(counts, quadratic=quadratic)
            assert found == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_kappa_of_a_single_class_is_undefined() -> None:
    counts = np.array([[4, 0], [0, 0]])
    assert math.isnan(cohen_kappa(counts)) and math.isnan(cohen_kappa(counts, quadratic=True))
    assert accuracy(counts) == 1.0 and macro_f1(counts) == 1.0
    assert cohen_kappa(np.array([[0, 1], [1, 0]])) == -1.0


def test_calibration_error_by_hand() -> None:
    confidence, correct = [0.95, 0.95, 0.55, 0.55, 0.1], [1, 1, 1, 0, 0]
    bins = reliability(confidence, correct)
    assert expected_calibration_error(bins) == pytest.approx((2 * 0.05 + 2 * 0.05 + 0.1) / 5)
    assert [each["count"] for each in bins] == [1, 2, 2]
    assert expected_calibration_error(reliability([0.0, 1.0], [0, 1])) == 0.0


def test_the_temperature_undoes_overconfidence() -> None:
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(4000, 5))
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    drawn = np.array([draw.choice(5, p=row) for row in probs])
    targets = np.eye(5)[drawn]
    found = fit_temperature(3 * np.log(probs), targets)
    assert found == pytest.approx(3.0, rel=0.08)
    sharp = soften(probs, 1 / 3)
    assert soften(sharp, 3.0) == pytest.approx(probs, abs=1e-9)


def test_rouge_l_by_hand() -> None:
    assert rouge_l("the cat sat on the mat", "the cat lay on a mat") == pytest.approx(2 * 4 / 12)
    assert rouge_l("Wrong word: casa.", "wrong WORD casa") == 1.0
    assert rouge_l("", "") == 1.0 and rouge_l("a", "") == 0.0
    assert rouge_l("a b c", "c b a") == pytest.approx(1 / 3)


def test_the_interval_covers_and_widens_for_dependent_items() -> None:
    def bounds(values: Floats, **options: Any) -> list[float]:
        draws = bootstrap_draws(len(values), **options)
        return intervals({"mean": lambda at: float(values[at].mean())}, draws)["mean"]

    values = np.random.default_rng(1).normal(3.0, 1.0, 200)
    error = 1.96 * values.std() / math.sqrt(200)
    assert bounds(values) == pytest.approx([values.mean() - error, values.mean() + error], abs=0.03)
    assert bounds(values) == bounds(values), "the same each time"
    repeated, groups = np.repeat(values[:30], 10), [str(place // 10) for place in range(300)]
    for places in bootstrap_draws(300, groups=groups, num_draws=20):
        assert len(places) == 300 and (places.reshape(-1, 10) == places[::10, None] + np.arange(10)).all()
    alone, grouped = bounds(repeated), bounds(repeated, groups=groups)
    assert grouped[1] - grouped[0] > 2 * (alone[1] - alone[0])
    for column, is_defined in (([math.nan] * 20, False), ([1.0, 2.0, math.nan], True)):
        each = {"metric": lambda at: float(at[0])}
        assert bool(intervals(each, np.array(column)[:, None])) == is_defined


@pytest.mark.slow
def test_ten_thousand_items_need_little_memory() -> None:
    draw = np.random.default_rng(0)
    items, found = [], []
    for number, score in enumerate(draw.uniform(0, 10, 10_000)):
        items.append(Item(id=str(number), group=str(number), task="", answers=("",), score=float(score)))
        found.append(Judgement(score=float(np.clip(score + draw.normal(), 0, 10))))
    tracemalloc.start()
    report = evaluate_items(items, found, scale=Scale(low=0, high=10), intervals=False)
    first, second = (np.array([each.score for each in some]) for some in (items, found))
    metrics = {"kendall": lambda at: kendall(first[at], second[at])}
    bounds = intervals(metrics, bootstrap_draws(10_000, num_draws=40))["kendall"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    tau = float(scipy.stats.kendalltau(first, second).statistic)
    assert report["metrics"]["kendall"] == pytest.approx(tau, abs=1e-12)
    assert bounds[0] < tau < bounds[1]
    assert peak < 100e6, "all pairs of items would need 800 MB"
