"""The distance between the logits of two models, compared with its definition on numbers checked by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from crosstune.core.logit_distance import BOUNDS, measure_agreement


def logits(*rows: list[float]) -> Any:
    return np.array(rows, np.float32)


def test_equal_logits_are_at_no_distance() -> None:
    same = [logits([1.0, 2.0, 3.0], [0.5, 0.0, -1.0])]
    found = measure_agreement(same, same)
    assert found.to_json() == {"max_abs": 0.0, "mean_kl": 0.0, "top1": 1.0, "relative": 0.0}


def test_what_softmax_ignores_does_not_count() -> None:
    plain = logits([1.0, 2.0, 4.0], [0.5, 0.0, -1.0])
    found = measure_agreement([plain], [plain + np.float32(8.0)])
    assert found.max_abs == 8.0
    assert found.top1 == 1.0
    assert (found.relative, found.mean_kl) == pytest.approx((0.0, 0.0), abs=1e-12)


def test_the_measures_over_positions_of_several_prompts() -> None:
    """Probabilities of 1/2, 1/2 against 3/4, 1/4, in one position of three; the others are equal."""
    even, skewed, third = [0.0, 0.0], [math.log(3.0), 0.0], [0.0, 2.0]
    reference, other = [logits(even, third), logits(third)], [logits(skewed, third), logits(third)]
    found = measure_agreement(reference, other)
    divergence = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert found.mean_kl == pytest.approx(divergence / 3, rel=1e-6)
    assert found.max_abs == pytest.approx(math.log(3.0), rel=1e-6)
    assert found.top1 == 1.0
    # Centred, the difference is (log 3 / 2, -log 3 / 2) in one position, and the reference is (-1, 1) in two.
    assert found.relative == pytest.approx(math.sqrt(2 * (math.log(3.0) / 2) ** 2 / 4), rel=1e-6)


def test_the_divergence_is_from_the_reference() -> None:
    one, other = [logits([0.0, 3.0])], [logits([0.0, 1.0])]
    forth, back = measure_agreement(one, other).mean_kl, measure_agreement(other, one).mean_kl
    p, q = 1 / (1 + math.exp(-3.0)), 1 / (1 + math.exp(-1.0))
    assert forth == pytest.approx(p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)), rel=1e-6)
    assert forth != pytest.approx(back, rel=1e-2)


def test_top1_is_the_share_of_positions_with_the_same_best_token() -> None:
    reference = [logits([2.0, 1.0], [1.0, 2.0]), logits([2.0, 1.0], [2.0, 1.0])]
    other = [logits([2.0, 1.0], [2.0, 1.0]), logits([1.0, 2.0], [2.0, 1.0])]
    found = measure_agreement(reference, other)
    assert (found.top1, found.max_abs) == (0.5, 1.0)


def test_large_logits_do_not_overflow() -> None:
    found = measure_agreement([logits([2000.0, 0.0])], [logits([1000.0, 0.0])])
    assert found.mean_kl == pytest.approx(0.0, abs=1e-12) and found.relative == pytest.approx(0.5)


def test_what_is_not_a_number_is_never_taken_for_equal() -> None:
    found = measure_agreement([logits([1.0, 2.0])] * 2, [logits([math.nan, 2.0]), logits([1.0, 2.0])])
    assert math.isnan(found.max_abs) and math.isnan(found.mean_kl) and math.isnan(found.relative)


def test_rounding_makes_no_divergence_negative() -> None:
    """One token of little probability moves a little: the divergence is less than the rounding of its sum."""
    draw = np.random.default_rng(0)
    for _ in range(50):
        one = draw.standard_normal((1, 50)).astype(np.float32)
        one[0, 0] = -10.0
        other = one.copy()
        other[0, 0] -= np.float32(1e-5)
        assert 0.0 <= measure_agreement([one], [other]).mean_kl < 1e-14


def test_a_flat_reference_has_no_relative_distance() -> None:
    assert measure_agreement([logits([1.0, 1.0])], [logits([1.0, 3.0])]).relative == 0.0


def test_other_shapes_and_numbers_of_prompts_are_refused() -> None:
    with pytest.raises(AssertionError):
        measure_agreement([logits([1.0, 2.0])], [logits([1.0])])
    with pytest.raises(ValueError, match="shorter"):
        measure_agreement([logits([1.0])] * 2, [logits([1.0])])


def test_coarser_formats_have_wider_bounds_and_none_allows_a_wrong_layout() -> None:
    for coarser, finer in [
        ("fp16", "fp32"),
        ("bf16", "fp16"),
        ("8", "bf16"),
        ("6", "8"),
        ("5", "6"),
        ("4", "5"),
    ]:
        assert 0 < BOUNDS[finer] < BOUNDS[coarser] < 1
    assert BOUNDS["bf16"] <= BOUNDS["q8_0"] <= BOUNDS["8"]
