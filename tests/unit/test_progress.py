"""Totals of a run, and the assessment of its evaluations: best step, early stopping, overfitting."""

from __future__ import annotations

import json
import math

import pytest

from crosstune.core.protocols import Backward, Memory
from crosstune.loop.progress import (
    Progress,
    best_step,
    early_stopping_message,
    evaluation_warning,
    overfits,
    stops_early,
)

Losses = dict[int, float]


def add(progress: Progress, *, tokens: int, seconds: float) -> None:
    result = Backward(loss=1.0, grad_norm=1.0, weight=tokens // 2, num_tokens=tokens)
    progress.add(result, step_s=seconds, memory=Memory(used_bytes=1, peak_bytes=2))


def test_the_rate_leaves_out_the_first_step_of_a_process() -> None:
    progress = Progress()
    assert progress.tokens_per_s() is None
    add(progress, tokens=100, seconds=10.0)
    assert progress.tokens_per_s() == 10.0  # the only one there is
    add(progress, tokens=300, seconds=2.0)
    assert progress.tokens_per_s() == 150.0
    add(progress, tokens=100, seconds=2.0)
    assert progress.tokens_per_s() == 100.0
    assert (progress.tokens, progress.weight, progress.seconds) == (500, 250, 14.0)
    assert progress.longest_step_s == 10.0


def test_a_continued_run_warms_up_again() -> None:
    progress = Progress()
    for _ in range(3):
        add(progress, tokens=100, seconds=1.0)
    continued = Progress.from_manifest(progress.to_manifest())
    assert (continued.steps, continued.start_step, continued.tokens, continued.weight) == (3, 3, 300, 150)
    assert continued.tokens_per_s() is None  # the rate belongs to the process that measured it
    add(continued, tokens=100, seconds=50.0)
    add(continued, tokens=200, seconds=1.0)
    assert continued.tokens_per_s() == 200.0


def test_a_skipped_step_counts_as_a_step_without_tokens() -> None:
    progress = Progress()
    progress.add(None, step_s=3.0, memory=Memory(used_bytes=1, peak_bytes=7))
    assert (progress.steps, progress.skipped, progress.tokens, progress.seconds) == (1, 1, 0, 3.0)
    assert progress.peak_memory_bytes == 7 and progress.first_loss is None


def test_what_the_losses_are_a_sum_over_is_carried_under_the_recipes_name() -> None:
    progress = Progress(weight_name="examples")
    add(progress, tokens=100, seconds=1.0)
    assert progress.summary()["examples"] == 50
    assert Progress.from_manifest(progress.to_manifest(), weight_name="examples").weight == 50


def test_a_run_starts_from_nothing() -> None:
    progress = Progress()
    assert (progress.status, progress.steps, progress.start_step, progress.skipped) == ("failed", 0, 0, 0)
    assert (progress.seconds, progress.wall_s, progress.longest_step_s) == (0.0, 0.0, 0.0)
    assert (progress.peak_memory_bytes, progress.tokens, progress.weight) == (0, 0, 0)
    assert progress.summary()["first_loss"] is None and progress.summary()["eval_loss"] is None


def test_the_first_and_the_final_loss_and_the_peaks() -> None:
    progress = Progress()
    progress.add(None, step_s=1.0, memory=Memory(used_bytes=1, peak_bytes=5))
    for loss, peak in ((3.0, 9), (2.0, 7), (1.0, 8)):
        result = Backward(loss=loss, grad_norm=1.0, weight=1, num_tokens=1)
        progress.add(result, step_s=loss, memory=Memory(used_bytes=1, peak_bytes=peak))
    summary = progress.summary()
    assert (summary["first_loss"], summary["final_loss"], summary["skipped_steps"]) == (3.0, 1.0, 1)
    assert summary["peak_memory_bytes"] == 9 and progress.longest_step_s == 3.0


def test_a_checkpoint_carries_everything_but_the_rate() -> None:
    progress = Progress(eval_before={"loss": 4.0}, evaluations={2: 3.5, 4: 3.0}, wall_s=60.0, skipped=2)
    add(progress, tokens=100, seconds=2.0)
    progress.eval_after = {"loss": 3.0}
    assert progress.summary()["eval_loss"] == 3.0 and progress.summary()["eval_before"] == {"loss": 4.0}
    carried = json.loads(json.dumps(progress.to_manifest()))
    again = Progress.from_manifest(carried)
    assert again.evaluations == {2: 3.5, 4: 3.0} and again.eval_before == {"loss": 4.0}
    assert (again.wall_s, again.skipped, again.seconds, again.peak_memory_bytes) == (60.0, 2, 2.0, 2)
    assert (again.first_loss, again.final_loss) == (1.0, 1.0)
    assert again.to_manifest() == progress.to_manifest()


def test_a_checkpoint_that_says_less_is_read() -> None:
    unfinite = Progress.from_manifest(
        {"steps": 3, "evaluations": {"2": None}, "eval_metrics": {"2": {"loss": None}}}
    )
    assert math.isnan(unfinite.evaluations[2]) and math.isnan(unfinite.eval_metrics[2]["loss"])
    bare = Progress.from_manifest({"steps": 3, "eval_before": None, "evaluations": None})
    assert (bare.steps, bare.start_step, bare.weight, bare.tokens) == (3, 3, 0, 0)
    assert bare.eval_before == {} and bare.evaluations == {}


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
