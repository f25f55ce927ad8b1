"""Losses, gradients and metrics of reinforcement learning equal TRL's, recorded by record_rl_trl.py, in every array library."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from record_rl_trl import CAP, CASES, FILE, LENGTHS, LONGEST, make_inputs, record

from crosstune.mlx_engine import array_functions as mlx_functions
from crosstune.recipes.rl.losses import RlLoss, advantages, loss_and_metrics
from crosstune.torch_engine import array_functions as torch_functions

RECORDED = json.loads(FILE.read_text())
BOUND = 1e-5


def loss_of(name: str) -> RlLoss:
    given, low = CASES[name], CASES[name].get("low", 0.2)
    return RlLoss(
        name=name.split()[0], beta=given.get("kl", 0.0), low=low, high=given.get("high", low), longest=LONGEST,
        correction=given.get("correction", "none"), cap=CAP,
    )  # fmt: skip


def run(
    name: str, values: dict[str, Any], f: Any, log_probs: Any, counted: Any
) -> tuple[Any, dict[str, Any]]:
    """Return the mean loss and the mean metrics."""
    loss = loss_of(name)
    arrays = {key: values[key] for key in ("sampler", "reference", "advantages", "kept")}
    if values["old"] is not None:
        arrays["old"] = values["old"]
    total, sums = loss_and_metrics(
        loss,
        f,
        arrays,
        log_probs=log_probs,
        entropies=0 * log_probs,
        answers=values["answers"],
        counted=counted,
    )
    num_tokens = sum(n for n, kept in zip(LENGTHS, make_inputs(name)["kept"], strict=True) if kept)
    return total / loss.weight(len(LENGTHS), num_tokens), sums


def check(name: str, total: float, gradient: Any, sums: dict[str, Any]) -> None:
    wanted = RECORDED[name]
    assert total == pytest.approx(wanted["loss"], rel=BOUND, abs=BOUND)
    np.testing.assert_allclose(gradient, wanted["gradient"], rtol=BOUND, atol=BOUND)
    assert np.abs(wanted["gradient"]).max() > 1e-3
    for key, value in wanted["metrics"].items():
        if "masked" not in name or key == "kl":  # TRL counts answers that are left out among the clipped
            assert float(sums[key][0]) / float(sums[key][1]) == pytest.approx(value, abs=BOUND), key


@pytest.mark.parametrize("name", CASES)
def test_torch_equals_trl(name: str) -> None:
    values = {key: None if value is None else torch.tensor(value) for key, value in make_inputs(name).items()}
    own = values["log_probs"].requires_grad_()
    total, sums = run(name, values, torch_functions, own, torch.ones(len(own), dtype=torch.float64))
    total.backward()
    check(name, float(total), own.grad.numpy(), sums)


@pytest.mark.parametrize("name", CASES)
def test_mlx_equals_trl_also_with_padding(name: str) -> None:
    raw = make_inputs(name)
    pad = {"log_probs", "old", "sampler", "reference", "answers"}
    values = {}
    for key, value in raw.items():
        padded = np.pad(value, (0, 3)) if value is not None and key in pad else value
        values[key] = (
            None if padded is None else mx.array(padded.astype(np.int32 if key == "answers" else np.float32))
        )
    counted = mx.array((np.arange(sum(LENGTHS) + 3) < sum(LENGTHS)).astype(np.float32))

    def compute(log_probs: mx.array) -> tuple[mx.array, dict[str, Any]]:
        return run(name, values, mlx_functions, log_probs, counted)

    (total, sums), gradient = mx.value_and_grad(compute)(values["log_probs"])
    assert not np.array(gradient)[sum(LENGTHS) :].any()
    check(name, float(total), np.array(gradient)[: sum(LENGTHS)], sums)


def test_the_recorded_numbers_are_those_of_trl() -> None:
    pytest.importorskip("trl")
    for name, wanted in RECORDED.items():
        assert record(name)["loss"] == pytest.approx(wanted["loss"], rel=1e-9)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_by_their_formulas(scale: str) -> None:
    rewards = torch.tensor(
        [[1.0, 0.0, 0.5, 0.25], [2.0, 2.0, 2.0, 2.0], [0.0, 3.0, 1.0, 1.0]], dtype=torch.float64
    )
    plain = rewards - rewards.mean(dim=1, keepdim=True)
    divisor = {
        "group": rewards.std(dim=1, keepdim=True),
        "batch": rewards.std(),
        "none": torch.tensor(1 - 1e-4),
    }[scale]
    np.testing.assert_allclose(
        advantages(rewards.numpy(), name="grpo", scale=scale), plain / (divisor + 1e-4), rtol=1e-12
    )
    others = (rewards.sum(dim=1, keepdim=True) - rewards) / 3
    np.testing.assert_allclose(
        advantages(rewards.numpy(), name="rloo", scale="none"), rewards - others, atol=1e-12
    )


def test_an_answer_without_a_reward_teaches_nothing() -> None:
    rewards = np.array([[1.0, np.nan, 0.0], [np.nan, np.nan, 5.0], [np.nan] * 3])
    for name in ("grpo", "rloo"):
        found = advantages(rewards, name=name, scale="none")
        assert found[0, 0] == -found[0, 2] > 0 and not found[1:].any() and found[0, 1] == 0
