"""Each verdict of the rl recipe, provoked by metrics of runs, and silent on a good run."""

from __future__ import annotations

from typing import Any

import pytest

from crosstune.recipes.rl.verdicts import RECENT_STEPS, Verdicts

GOOD = {
    "frac_reward_zero_std": 0.2, "completions/clipped_ratio": 0.1, "entropy": 1.0, "rewards/exact/failed": 0.0,
    "rewards/watch/judge/failed": 0.0, "sampling/sampling_logp_difference/mean": 1e-4,
}  # fmt: skip


def run(change: Any, *, steps: int = 40) -> dict[str, str]:
    """Return the verdicts that stand after steps with GOOD metrics and those of `change(fraction done)`."""
    verdicts = Verdicts(names=["exact", "watch/judge"], sampler_bound=0.02, max_new_tokens=16)
    found: dict[str, str] = {}
    for step in range(steps):
        noise = 0.02 * (step % 3)
        rising = {
            "reward": 0.2 + step / steps + noise,
            "rewards/watch/judge/mean": 5 + 2 * step / steps + noise,
        }
        found |= verdicts.observe_step(GOOD | rising | change(step / steps))
    return {name: sentence for name, sentence in found.items() if sentence}


def test_a_good_run_has_none() -> None:
    assert run(lambda done: {}) == {}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "reward hacking",
            lambda done: {"rewards/watch/judge/mean": 5 - done},
            "but judge scores the answers",
        ),
        ("entropy collapse", lambda done: {"entropy": max(0.01, 1 - 2 * done)}, "--epsilon_high"),
        ("all groups equal", lambda done: {"frac_reward_zero_std": 1.0}, "--dynamic_sampling"),
        (
            "answers cut",
            lambda done: {"completions/clipped_ratio": 0.8},
            "80% of the answers are cut at 16 tokens",
        ),
        ("reward exact fails", lambda done: {"rewards/exact/failed": 0.9}, "no score for 90%"),
        ("sampler difference", lambda done: {"sampling/sampling_logp_difference/mean": 0.3}, "differ by 0.3"),
    ],
)
def test_each_problem_is_recognized(name: str, change: Any, words: str) -> None:
    found = run(change)
    assert set(found) == {name} and words in found[name]


def test_a_problem_that_is_over_is_withdrawn() -> None:
    cut = {"completions/clipped_ratio": 0.9}
    assert "answers cut" in run(lambda done: cut)
    assert run(lambda done: cut if done < 0.5 else {}) == {}


def test_reward_hacking_on_held_out_prompts() -> None:
    verdicts = Verdicts(names=["exact", "watch/judge"], sampler_bound=0.02, max_new_tokens=16)
    before = {
        "reward": 0.2,
        "reward_std": 0.3,
        "rewards/watch/judge/mean": 6.0,
        "rewards/watch/judge/std": 1.0,
    }
    hacked = before | {"reward": 0.9, "rewards/watch/judge/mean": 4.0}
    honest = before | {"reward": 0.9, "rewards/watch/judge/mean": 8.0}
    [sentence] = verdicts.observe_evaluation({0: before, 9: hacked}, num=50).values()
    assert "on held-out prompts" in sentence and "judge scores the answers 6 before and 4 now" in sentence
    assert [*verdicts.observe_evaluation({0: before, 9: honest}, num=50).values()] == [""]
    few = verdicts.observe_evaluation({0: before, 9: before | {"reward": 0.25}}, num=50)
    assert [*few.values()] == [""], "a rise by chance"
    unscored = hacked | {"reward": 0.32, "completions/unscored_ratio": 0.8}
    assert [*verdicts.observe_evaluation({0: before, 9: unscored}, num=50).values()] == [""], "10 scores"


def test_a_short_run_has_no_verdict_of_two_ends() -> None:
    assert run(lambda done: {"entropy": 1 - done}, steps=RECENT_STEPS) == {}
