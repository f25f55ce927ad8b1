"""Learning-rate schedules against their definitions."""

from __future__ import annotations

import math

import pytest

from crosstune.core.schedule import SCHEDULES, learning_rate, warmup_steps


def rates(schedule: str, *, num_steps: int = 100, warmup: int = 10, floor: float = 0.1) -> list[float]:
    return [
        learning_rate(s, peak=2.0, schedule=schedule, num_steps=num_steps, warmup=warmup, floor_ratio=floor)
        for s in range(num_steps)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_is_linear_and_reaches_the_peak(schedule: str) -> None:
    assert rates(schedule)[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates(schedule)[10] == pytest.approx(2.0)


def test_constant_stays() -> None:
    assert rates("constant", warmup=0) == [2.0] * 100


def test_linear_ends_near_zero() -> None:
    assert rates("linear", warmup=0)[50] == pytest.approx(1.0)
    assert rates("linear")[-1] == pytest.approx(2.0 / 90)


def test_cosine_is_the_cosine_between_peak_and_floor() -> None:
    expected = 2.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 45 / 90)))
    assert rates("cosine")[55] == pytest.approx(expected)
    assert rates("cosine")[-1] == pytest.approx(0.2, rel=0.01)


def test_restarts_come_back_to_the_peak() -> None:
    values = rates("cosine_with_restarts", num_steps=90, warmup=0)
    assert values[30] == pytest.approx(2.0)
    assert values[60] == pytest.approx(2.0)
    assert values[29] < 0.25


def test_restarts_end_at_the_floor() -> None:
    options = {"peak": 2.0, "num_steps": 90, "warmup": 0, "floor_ratio": 0.1}
    after_the_end = learning_rate(90, schedule="cosine_with_restarts", **options)
    assert after_the_end == pytest.approx(0.2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_rate_stays_where_it_ended(schedule: str) -> None:
    options = {"peak": 2.0, "num_steps": 100, "warmup": 10, "floor_ratio": 0.1}
    ended = learning_rate(100, schedule=schedule, **options)
    assert ended == pytest.approx({"constant": 2.0, "linear": 0.0, "polynomial": 0.0}.get(schedule, 0.2))
    assert learning_rate(130, schedule=schedule, **options) == ended


def test_polynomial_is_a_square() -> None:
    assert rates("polynomial", warmup=0)[50] == pytest.approx(2.0 * 0.5**2)
    assert rates("polynomial")[40] == pytest.approx(2.0 * (2 / 3) ** 2)


def test_exponential_is_a_power_of_the_floor() -> None:
    assert rates("exponential", warmup=0)[50] == pytest.approx(2.0 * 0.1**0.5)
    assert rates("exponential", warmup=0, floor=0.0)[50] == pytest.approx(2.0 * 0.001**0.5)


def test_a_run_that_is_all_warm_up_has_a_rate_after_it() -> None:
    options = {"peak": 2.0, "num_steps": 4, "warmup": 4, "floor_ratio": 0.1}
    assert learning_rate(4, schedule="linear", **options) == 2.0
    assert learning_rate(5, schedule="linear", **options) == 0.0


def test_polynomial_and_exponential_fall_monotonically() -> None:
    for schedule in ("polynomial", "exponential"):
        values = rates(schedule)[10:]
        assert values == sorted(values, reverse=True)
    assert rates("exponential")[-1] == pytest.approx(0.2, rel=0.05)


def test_warm_up_lengths() -> None:
    assert warmup_steps(schedule="cosine", num_steps=200, steps=None, ratio=None) == 20
    assert warmup_steps(schedule="constant", num_steps=200, steps=None, ratio=None) == 0
    assert warmup_steps(schedule="cosine", num_steps=200, steps=7, ratio=None) == 7
    assert warmup_steps(schedule="cosine", num_steps=200, steps=None, ratio=0.5) == 100
    assert warmup_steps(schedule="cosine", num_steps=5, steps=50, ratio=None) == 5


def test_a_run_of_one_step_has_a_rate() -> None:
    assert learning_rate(0, peak=1.0, schedule="cosine", num_steps=1, warmup=0, floor_ratio=0.1) == 1.0
