"""The judge's metrics against scipy and scikit-learn: random inputs, ties, degenerate cases."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
from numpy.typing import NDArray

from crosstune.recipes.judge.metrics import resampled
from crosstune.recipes.judge.metrics.agreement import (
    accuracy,
    cohen_kappa,
    confusion,
    count_pairs,
    macro_f1,
)
from crosstune.recipes.judge.metrics.bootstrap import draw_weights, interval
from crosstune.recipes.judge.metrics.calibration import (
    expected_calibration_error,
    fit_temperature,
    reliability,
    soften,
)
from crosstune.recipes.judge.metrics.correlation import (
    kendall,
    mean_absolute_error,
    mean_ranks,
    pearson,
    root_mean_squared_error,
    share_within,
    spearman,
)
from crosstune.recipes.judge.metrics.rouge import rouge_l

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
        assert ours(first, second) == pytest.approx(expected, abs=1e-9, nan_ok=True), ours.__name__


@pytest.mark.parametrize(("name", "first", "second"), pairs(), ids=[case[0] for case in pairs()])
def test_errors_are_those_of_scikit_learn(name: str, first: Floats, second: Floats) -> None:
    assert mean_absolute_error(first, second) == pytest.approx(
        sklearn.metrics.mean_absolute_error(first, second)
    )
    expected = sklearn.metrics.root_mean_squared_error(first, second)
    assert root_mean_squared_error(first, second) == pytest.approx(expected)
    assert mean_ranks(first) == pytest.approx(scipy.stats.rankdata(first))


def test_too_few_values_have_no_correlation() -> None:
    for metric in (pearson, spearman, kendall):
        assert math.isnan(metric([1.0], [2.0]))
        assert math.isnan(metric([], []))
    assert math.isnan(mean_absolute_error([], []))


def test_a_score_just_a_point_away_is_within_a_point() -> None:
    assert share_within([7.7, 5.0, 5.0], [8.7, 6.5, math.nan], distance=1) == pytest.approx(1 / 3)


def labels(seed: int, count: int, num_classes: int) -> tuple[list[int], list[int]]:
    draw = np.random.default_rng(seed)
    first = draw.integers(0, num_classes, count)
    second = np.where(draw.random(count) < 0.6, first, draw.integers(0, num_classes, count))
    return first.tolist(), second.tolist()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("count", "num_classes"), [(5, 2), (40, 3), (300, 11)])
def test_agreement_is_that_of_scikit_learn(seed: int, count: int, num_classes: int) -> None:
    first, second = labels(seed, count, num_classes)
    classes = list(range(num_classes))
    counts = confusion(first, second, classes=classes)
    assert counts.tolist() == sklearn.metrics.confusion_matrix(first, second, labels=classes).tolist()
    assert accuracy(counts) == pytest.approx(sklearn.metrics.accuracy_score(first, second))
    assert macro_f1(counts) == pytest.approx(sklearn.metrics.f1_score(first, second, average="macro"))
    for quadratic, weights in ((False, None), (True, "quadratic")):
        expected = sklearn.metrics.cohen_kappa_score(first, second, labels=classes, weights=weights)
        assert cohen_kappa(counts, quadratic=quadratic) == pytest.approx(expected, nan_ok=True)


def test_kappa_of_a_single_class_is_undefined() -> None:
    counts = confusion(["A"] * 4, ["A"] * 4, classes=["A", "B"])
    assert math.isnan(cohen_kappa(counts)) and math.isnan(cohen_kappa(counts, quadratic=True))
    assert accuracy(counts) == 1.0 and macro_f1(counts) == 1.0
    assert cohen_kappa(confusion(["A", "B"], ["B", "A"], classes=["A", "B"])) == -1.0


def test_calibration_error_by_hand() -> None:
    confidence, correct = [0.95, 0.95, 0.55, 0.55, 0.1], [1, 1, 1, 0, 0]
    assert expected_calibration_error(confidence, correct) == pytest.approx((2 * 0.05 + 2 * 0.05 + 0.1) / 5)
    assert [each.count for each in reliability(confidence, correct)] == [1, 2, 2]
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


def test_the_interval_covers_and_is_the_same_each_time() -> None:
    draw = np.random.default_rng(1)
    values = draw.normal(3.0, 1.0, 200)
    found = interval(resampled.mean(draw_weights(200), values))
    assert found is not None
    error = 1.96 * values.std() / math.sqrt(200)
    assert found.low == pytest.approx(values.mean() - error, abs=0.03)
    assert found.high == pytest.approx(values.mean() + error, abs=0.03)
    assert found == interval(resampled.mean(draw_weights(200), values))


def test_dependent_items_widen_the_interval() -> None:
    values = np.repeat(np.random.default_rng(2).normal(size=30), 10)
    weights = draw_weights(300, groups=[str(place // 10) for place in range(300)])
    assert (weights.sum(axis=1) == 300).all() and (weights[:, ::10] == weights[:, 9::10]).all()
    alone, grouped = (
        interval(resampled.mean(draw_weights(300), values)),
        interval(resampled.mean(weights, values)),
    )
    assert alone is not None and grouped is not None
    assert grouped.high - grouped.low > 2 * (alone.high - alone.low)


def test_an_undefined_metric_has_no_interval() -> None:
    assert interval(np.full(20, math.nan)) is None and interval(np.zeros(0)) is None
    assert interval(np.array([1.0, 2.0, math.nan])) is not None


@pytest.mark.parametrize("seed", range(12))
def test_metrics_of_draws_are_those_of_the_drawn_items(seed: int) -> None:
    draw = np.random.default_rng(seed)
    count = int(draw.choice([2, 3, 8, 40]))
    first, second = draw.normal(size=(2, count)) * 10.0 ** draw.integers(-6, 7)
    if seed % 2:  # ties, and draws where a series is constant
        first, second = np.round(draw.uniform(0, 3, count)), np.round(draw.uniform(0, 2, count))
    groups = [str(draw.integers(0, count)) for _ in range(count)]
    weights = draw_weights(count, groups=groups if seed % 3 else None, num_draws=25, seed=seed)
    drawn = [np.repeat(np.arange(count), row.astype(int)) for row in weights]
    for name, plain in (("pearson", pearson), ("spearman", spearman), ("kendall", kendall)):
        found = getattr(resampled, name)(weights, first, second)
        assert found == pytest.approx(
            [plain(first[rows], second[rows]) for rows in drawn], abs=1e-9, nan_ok=True
        )
    rows, columns = draw.integers(0, 4, (2, count))
    for metric in (accuracy, macro_f1, cohen_kappa):
        found = resampled.of_counts(weights, rows, columns, metric, num_classes=4)
        expected = [metric(count_pairs(rows[each], columns[each], num_classes=4)) for each in drawn]
        assert found == pytest.approx(expected, nan_ok=True)


def test_draws_of_many_items_are_compared_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = np.random.default_rng(0).normal(size=(2, 30))
    weights = draw_weights(30, num_draws=5)
    whole = resampled.kendall(weights, first, second)
    monkeypatch.setattr(resampled, "_BLOCK", 7)
    assert resampled.kendall(weights, first, second) == pytest.approx(whole)
