"""The judge's metrics against scipy and scikit-learn: random inputs, ties, degenerate cases."""

from __future__ import annotations

import math
import tracemalloc
import warnings
from collections.abc import Iterator

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
    all_once,
    cohen_kappa,
    confusion_matrix,
    draw_weights,
    expected_calibration_error,
    fit_temperature,
    interval,
    kendall,
    macro_f1,
    mean,
    of_counts,
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
        [found] = ours(all_once(len(first)), first, second)
        error = 1e-9 if name == "large offset" else 1e-12
        assert found == pytest.approx(expected, abs=error, nan_ok=True), ours.__name__


def test_a_series_that_is_constant_up_to_rounding_has_no_correlation() -> None:
    first, second = np.array([0.1 + 0.2, 0.3, 0.3]), np.array([1.0, 2.0, 3.0])
    for metric in (pearson, spearman, kendall):
        assert math.isnan(metric(all_once(3), first, second)[0])
        assert math.isnan(metric(all_once(1), first[:1], second[:1])[0])


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
    assert expected_calibration_error(confidence, correct) == pytest.approx((2 * 0.05 + 2 * 0.05 + 0.1) / 5)
    assert [each["count"] for each in reliability(confidence, correct)] == [1, 2, 2]
    assert math.isnan(expected_calibration_error([], []))
    assert expected_calibration_error([0.0, 1.0], [0, 1]) == 0.0


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
    values = np.random.default_rng(1).normal(3.0, 1.0, 200)
    found = interval(lambda w: mean(w, values), draw_weights(200))
    error = 1.96 * values.std() / math.sqrt(200)
    assert found == pytest.approx([values.mean() - error, values.mean() + error], abs=0.03)
    assert found == interval(lambda w: mean(w, values), draw_weights(200)), "the same each time"
    repeated = np.repeat(values[:30], 10)
    weights = draw_weights(300, groups=[str(place // 10) for place in range(300)])
    assert (weights.sum(axis=1) == 300).all() and (weights[:, ::10] == weights[:, 9::10]).all()
    alone, grouped = (interval(lambda w: mean(w, repeated), each) for each in (draw_weights(300), weights))
    assert alone is not None and grouped is not None
    assert grouped[1] - grouped[0] > 2 * (alone[1] - alone[0])
    for values, is_defined in (([math.nan] * 20, False), ([1.0, 2.0, math.nan], True)):
        assert (interval(lambda w: w[:, 0], np.array(values)[:, None]) is not None) == is_defined


def test_ten_thousand_items_need_little_memory() -> None:
    draw = np.random.default_rng(0)
    items, found = [], []
    for number, score in enumerate(draw.uniform(0, 10, 10_000)):
        items.append(Item(id=str(number), group=str(number), task="", answers=("",), score=float(score)))
        found.append(Judgement(score=float(np.clip(score + draw.normal(), 0, 10))))
    tracemalloc.start()
    report = evaluate_items(items, found, scale=Scale(low=0, high=10), intervals=False)
    first, second = (np.array([each.score for each in some]) for some in (items, found))
    bounds = interval(lambda w: kendall(w, first, second), draw_weights(10_000, num_draws=100))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    tau = float(scipy.stats.kendalltau(first, second).statistic)
    assert report["metrics"]["kendall"] == pytest.approx(tau, abs=1e-12)
    assert bounds is not None and bounds[0] < tau < bounds[1]
    assert peak < 100e6, "all pairs of items would need 800 MB"


@pytest.mark.parametrize("seed", range(6))
def test_metrics_of_draws_are_those_of_the_drawn_items(seed: int) -> None:
    draw = np.random.default_rng(seed)
    count = int(draw.choice([3, 8, 40]))
    first, second = draw.normal(size=(2, count)) * 10.0 ** draw.integers(-6, 7)
    if seed % 2:  # ties, and draws where a series is constant
        first, second = np.round(draw.uniform(0, 3, count)), np.round(draw.uniform(0, 2, count))
    groups = [str(draw.integers(0, count)) for _ in range(count)]
    weights = draw_weights(count, groups=groups if seed % 3 else None, num_draws=25, seed=seed)
    drawn = [np.repeat(np.arange(count), row.astype(int)) for row in weights]
    for ours, theirs in (
        (pearson, scipy.stats.pearsonr),
        (spearman, scipy.stats.spearmanr),
        (kendall, scipy.stats.kendalltau),
    ):
        expected = [float(theirs(first[rows], second[rows]).statistic) for rows in drawn]
        assert ours(weights, first, second) == pytest.approx(expected, abs=1e-9, nan_ok=True)
    rows, columns = draw.integers(0, 4, (2, count))
    for metric in (accuracy, macro_f1, cohen_kappa):
        expected = [metric(confusion_matrix(rows[each], columns[each], num_classes=4)) for each in drawn]
        assert of_counts(weights, rows, columns, metric, num_classes=4) == pytest.approx(
            expected, nan_ok=True
        )
