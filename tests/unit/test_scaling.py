from __future__ import annotations

import itertools

import pytest

from crosstune.loop.step import SMALLEST, START, STEPS_TO_GROW, LossScale, needs_loss_scale


def test_the_factor_halves_until_nothing_is_left() -> None:
    scale = LossScale(enabled=True)
    factors = [scale.factor]
    while scale.shrink() and len(factors) < 99:
        factors.append(scale.factor)
    assert factors[0] == START and factors[-1] == SMALLEST
    assert all(after == before / 2 for before, after in itertools.pairwise(factors))
    assert scale.shrink() is False and scale.factor == SMALLEST


def test_the_factor_doubles_after_enough_good_steps_in_a_row() -> None:
    scale = LossScale(enabled=True)
    scale.shrink()
    scale.shrink()
    for _ in range(STEPS_TO_GROW - 1):
        scale.grow()
    assert scale.factor == START / 4
    scale.grow()
    assert (scale.factor, scale.good_steps) == (START / 2, 0)
    for _ in range(STEPS_TO_GROW - 1):
        scale.grow()
    scale.shrink()  # an overflow: the count begins anew
    assert (scale.factor, scale.good_steps) == (START / 4, 0)
    for _ in range(STEPS_TO_GROW):
        scale.grow()
    assert scale.factor == START / 2


def test_the_factor_never_exceeds_its_start() -> None:
    scale = LossScale(enabled=True)
    for _ in range(3 * STEPS_TO_GROW):
        scale.grow()
    assert scale.factor == START


def test_a_run_without_scaling_stays_at_one() -> None:
    scale = LossScale(enabled=False)
    for _ in range(2 * STEPS_TO_GROW):
        scale.grow()
    assert scale.factor == 1.0 and not scale.shrink()
    scale.load({"factor": 8.0, "good_steps": 3})
    assert (scale.factor, scale.good_steps) == (1.0, 0)


def test_a_scale_goes_through_json() -> None:
    scale = LossScale(enabled=True)
    scale.shrink()
    scale.grow()
    other = LossScale(enabled=True)
    other.load(scale.to_json())
    assert other == scale


@pytest.mark.parametrize(
    ("precision", "needed"),
    [("fp32", False), ("bf16", False), ("bf16_autocast", False), ("fp16", True), ("fp16_autocast", True)],
)
def test_only_fp16_is_scaled(precision: str, needed: bool) -> None:
    assert needs_loss_scale(precision) is needed
