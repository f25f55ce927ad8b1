"""The judgement of evaluations: the best step, early stopping, overfitting."""

from __future__ import annotations

import math

import pytest

from crosstune.loop.progress import (
    best_step,
    early_stopping_message,
    evaluation_warning,
    overfits,
    stops_early,
)

Losses = dict[int, float]


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ({}, None),
        ({0: 1.0}, None),
        ({0: 1.0, 10: 2.0, 20: 3.0}, 10),
        ({10: 2.0, 20: 2.0}, 10),
        ({10: math.nan, 20: 5.0}, 20),
        ({30: 1.0, 10: 2.0, 20: 0.5}, 20),
    ],
)
def test_the_best_step_is_one_that_was_trained(losses: Losses, step: int | None) -> None:
    assert best_step(losses) == step


@pytest.mark.parametrize(
    ("losses", "patience", "stops"),
    [
        ({10: 1.0, 20: 2.0, 30: 2.0}, 0, False),
        ({10: 1.0, 20: 2.0}, 2, False),
        ({10: 1.0, 20: 2.0, 30: 2.0}, 2, True),
        ({10: 1.0, 20: 1.0, 30: 1.0}, 2, True),
        ({10: 1.0, 20: 2.0, 30: 0.9}, 1, False),
        ({0: 0.1, 10: 1.0}, 1, False),
        ({10: 1.0, 20: math.nan}, 1, True),
        ({0: 1.0, 10: math.nan}, 2, False),
        ({0: 1.0, 10: math.nan, 20: math.inf}, 2, True),
        ({0: math.nan, 10: math.nan, 20: 1.0}, 1, False),
    ],
)
def test_early_stopping_counts_evaluations_without_improvement(
    losses: Losses, patience: int, stops: bool
) -> None:
    assert stops_early(losses, patience=patience) is stops


def test_overfitting_is_a_clear_rise_and_noise_is_not() -> None:
    assert not overfits({}) and not overfits({10: 1.0, 20: 1.015})
    assert overfits({0: 9.0, 10: 2.0, 20: 2.5})
    assert not overfits({10: 2.0, 20: 2.5, 30: 1.9})
    assert "2.0000 at step 10 and is 2.5000 at step 20" in evaluation_warning({10: 2.0, 20: 2.5})[1]


def test_a_loss_that_is_not_finite_is_named_in_the_warning_and_at_the_end() -> None:
    assert evaluation_warning({}) == evaluation_warning({0: 1.0, 10: 0.5}) == ("", "")
    for value in (math.nan, math.inf, -math.inf):
        word, message = evaluation_warning({0: 1.0, 10: value})
        assert word == "not finite" and f"at step 10 is {value}" in message
    assert evaluation_warning({0: math.nan})[0] == "not finite"
    assert evaluation_warning({0: math.nan, 10: 2.0, 20: 2.5})[0] == "overfitting"
    assert "2 evaluations in a row is not finite" in early_stopping_message(
        {0: 1.0, 10: 0.9, 20: math.nan, 30: math.inf}, patience=2
    )
    assert "no lower evaluation loss" in early_stopping_message({10: 1.0, 20: 1.1, 30: math.nan}, patience=2)
