"""Intervals of fractions and differences, as they are shown for benchmarks and judges."""

from __future__ import annotations

from typing import Any

import pytest

from crosstune.core.intervals import differ, mean_interval, wilson
from crosstune.recipes.judge.evaluation import evaluate_items
from crosstune.recipes.judge.items import Item, Scale
from crosstune.recipes.judge.judge import Judgement
from crosstune.report.eval_section import eval_rows


@pytest.mark.parametrize(
    ("fraction", "count", "low", "high"),
    [(0.5, 10, 0.2366, 0.7634), (1.0, 20, 0.8389, 1.0), (0.0, 5, 0.0, 0.4345), (0.0, 10, 0.0, 0.2775)],
)
def test_wilson_intervals(fraction: float, count: int, low: float, high: float) -> None:
    """Values from the textbook."""
    assert wilson(fraction, count) == pytest.approx((low, high), abs=1e-4)


def test_newcombes_interval_of_a_difference() -> None:
    """His example: 56 of 70 and 48 of 80 differ (0.0524 to 0.3339); 9 of 10 and 3 of 10 too, 3 of 10 and 0 of 10 do not."""
    for first, second, differs in (
        ((56, 70), (48, 80), True),
        ((9, 10), (3, 10), True),
        ((3, 10), (0, 10), False),
    ):
        for pair in ((first, second), (second, first)):
            values = [part / whole for part, whole in pair]
            intervals = [wilson(part / whole, whole) for part, whole in pair]
            assert differ(*values, intervals=intervals) == differs


def result(side: str, value: float, **facts: Any) -> dict[str, Any]:
    return {"side": side, "task": "t", "metric": "acc", "value": value, "num_samples": 10} | facts


def test_benchmarks_at_0_and_1_have_intervals_and_few_rows_prove_little() -> None:
    found = eval_rows([result("before", 0.0, stderr=0.0), result("after", 0.3, stderr=(0.21 / 9) ** 0.5)])
    assert found is not None
    [row] = found["rows"]
    assert row["before"] == "0.0000 (0.0000 to 0.2775)" and row["after"] == "0.3000 (0.1078 to 0.6032)"
    assert row["change"] == "+0.3000, within noise"
    found = eval_rows([result("before", 0.0, stderr=0.0), result("after", 1.0, stderr=0.0)])
    assert found is not None and found["rows"][0]["change"] == "+1.0000, better"
    found = eval_rows([result("after", 12.5, stderr=1.0), result("before", 30.0, stderr=2.0)])
    assert found is not None and found["rows"][0]["after"] == "12.5000 (10.5400 to 14.4600)"
    assert found["rows"][0]["change"] == "\N{MINUS SIGN}17.5000, worse"


def test_a_mean_without_spread_has_the_interval_of_a_fraction_or_none() -> None:
    assert mean_interval([1.0] * 20) == pytest.approx((0.8389, 1.0), abs=1e-4)
    assert mean_interval([0.0] * 5) == pytest.approx((0.0, 0.4345), abs=1e-4)
    assert mean_interval([0.0, 1.0] * 5) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert mean_interval([0.5, 1.5]) == pytest.approx((1 - 1.959964 / 2, 1 + 1.959964 / 2))
    assert mean_interval([0.7] * 9) is mean_interval([1.0]) is mean_interval([]) is None


def test_a_judge_that_is_always_right_has_an_interval() -> None:
    items = [
        Item(id=str(n), group=str(n), task="", answers=("a", "b"), winner="AB"[n % 2]) for n in range(10)
    ]
    right = [Judgement(winner=item.winner, consistent=True) for item in items]
    found = evaluate_items(items, right, scale=Scale(low=0, high=10))["intervals"]
    for name in ("accuracy", "swap_consistency"):
        assert found[name] == pytest.approx(wilson(1.0, 10))
    assert "kappa" not in found


def test_results_of_a_damaged_file_are_left_out() -> None:
    whole = result("after", 1.0, stderr=0.0)
    for name in ("task", "metric", "chat_template", "num_fewshot", "limit", "side", "value", "num_samples"):
        for value in ({"a": 1}, [1], None, "x"):
            found = eval_rows([whole, {**whole, name: value}])
            assert found is not None and found["num_tasks"] in (1, 2)
