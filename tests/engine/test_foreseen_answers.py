"""Evaluation by exact match: what the passes for the loss tell of the answers is what generation would have written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import chat, train_step

from crosstune.config.load import make_config
from crosstune.core.events import Observers
from crosstune.core.protocols import UNSURE
from crosstune.planner.gather import make_plan
from crosstune.recipes.sft import SftRecipe
from crosstune.torch_engine.open import open_session
from crosstune.torch_engine.precision import PRECISIONS
from crosstune.torch_engine.tasks.causal_lm import likeliest_tokens, sure_lead
from crosstune.torch_engine.text_session import TextSession

PAIRS = [("red", "warm"), ("blue", "cold"), ("green", "mild"), ("white", "plain"), ("black", "dark")]


class Counting:
    """Pass on calls of `generate`, and remember the prompts."""

    def __init__(self, session: TextSession) -> None:
        self.prompts: list[list[int]] = []
        self.num_tokens: list[int] = []
        self.session, self.averaged = session, set[bool]()
        self._generate, session.generate = session.generate, self  # type: ignore[method-assign, assignment]

    def __call__(self, prompts: Sequence[list[int]], **options: Any) -> list[list[int]]:
        self.prompts += prompts
        self.averaged.add(self.session._is_averaged)
        answers = self._generate(prompts, **options)
        self.num_tokens = [len(answer) for answer in answers]
        return answers


@pytest.fixture(
    scope="module",
    params=[
        {"precision": "fp32", "train_type": "full"},
        {"precision": "bf16_autocast", "train_type": "full"},
        {"precision": "fp32", "kernels": "fast"},
        {"precision": "bf16_autocast", "kernels": "fast"},
    ],
    ids=str,
)
def opened(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[SftRecipe, TextSession]:
    """A model that has learned three of five answers, which are all evaluated."""
    folder = tmp_path_factory.mktemp("data")
    rows = [chat(f"How is {colour}?", answer) for colour, answer in PAIRS]
    for name, kept in (("train", rows[:3] * 8), ("eval", rows)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    config = make_config(
        backend="cpu",
        model_name=str(tiny_model),
        **request.param,
        dataset=str(folder / "train.jsonl"),
        eval_dataset=str(folder / "eval.jsonl"),
        eval_metric="exact_match",
        num_samples=4,
        max_new_tokens=12,
    )
    plan = make_plan(config)
    recipe = SftRecipe(plan.config, model_folder=tiny_model, cache=folder)
    session = open_session(plan, model_folder=tiny_model)
    assert isinstance(session, TextSession)
    for _ in range(60):
        if (
            train_step(session, recipe.window(0), lr=3e-3 if config.train_type == "full" else 1e-2).loss
            < 0.02
        ):
            break
    return recipe, session


def evaluate(recipe: SftRecipe, session: TextSession) -> tuple[Any, list[list[int]]]:
    counting = Counting(session)
    try:
        return recipe.evaluate(session, observer=Observers()), counting.prompts
    finally:
        del session.generate


def test_answers_and_metrics_are_those_of_generation(
    opened: tuple[SftRecipe, TextSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, session = opened
    found, written = evaluate(recipe, session)
    monkeypatch.setattr(TextSession, "_may_foresee", lambda _: False)
    expected, every = evaluate(recipe, session)
    assert found.samples == expected.samples
    # With fast layers, logits that are kept for the answers are summed in another order than those that are not.
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-6)
    assert found.metrics["exact_match"] == pytest.approx(0.6)
    assert [sample.answer == sample.reference for sample in found.samples] == [True, True, True, False]
    assert len(every) == 5
    # Learned answers are known; of the two others, only the one that is shown is written to its end.
    assert written == [recipe.questions[3].tokens]


def test_answers_that_are_shown_do_not_wait_for_those_that_are_only_counted(
    opened: tuple[SftRecipe, TextSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, _ = opened
    monkeypatch.setattr(recipe, "config", dataclasses.replace(recipe.config, num_samples=2, batch_size=4))
    assert list(recipe._batch_questions([0, 1, 3, *range(5, 22)], apart=False)) == [
        [0, 1, 3, *range(5, 18)],
        [18, 19, 20, 21],
    ]
    assert list(recipe._batch_questions([0, 1, 3, *range(5, 22)], apart=True)) == [
        [0, 1],
        [3, *range(5, 20)],
        [20, 21],
    ]
    assert list(recipe._batch_questions([2, 3], apart=True)) == [[2, 3]]
    assert list(recipe._batch_questions([], apart=True)) == []


def test_a_wrong_answer_that_is_only_counted_is_not_written_to_its_end(
    opened: tuple[SftRecipe, TextSession], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, _ = opened
    untrained = open_session(make_plan(recipe.config), model_folder=tiny_model)
    assert isinstance(untrained, TextSession)
    monkeypatch.setattr(TextSession, "_may_foresee", lambda _: False)
    counting = Counting(untrained)
    few = recipe.evaluate(untrained, observer=Observers())
    assert counting.num_tokens == [12, 12, 12, 12, 4], "four of the five answers are shown"
    monkeypatch.setattr(recipe, "config", dataclasses.replace(recipe.config, num_samples=5))
    every = recipe.evaluate(untrained, observer=Observers())
    assert counting.num_tokens == [12] * 5
    assert few.metrics == every.metrics
    assert few.samples == every.samples[:4]


def test_every_answer_is_written_where_rounding_may_differ(
    opened: tuple[SftRecipe, TextSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, session = opened
    monkeypatch.setattr(session.model.config, "rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e4})
    assert len(evaluate(recipe, session)[1]) == 5


def test_answers_are_those_of_the_averaged_weights_whose_loss_is_measured(
    opened: tuple[SftRecipe, TextSession], tiny_model: Path
) -> None:
    recipe, _ = opened
    options = {"backend": "cpu", "precision": "fp32", "model_name": str(tiny_model), "ema_decay": 0.5}
    session = open_session(make_plan(make_config(**options)), model_folder=tiny_model)
    assert isinstance(session, TextSession)
    train_step(session, recipe.window(0), lr=1e-3)
    counting = Counting(session)
    recipe.evaluate(session, observer=Observers())
    assert counting.averaged == {True}


def test_a_token_is_likeliest_only_with_a_lead_that_rounding_does_not_undo() -> None:
    logits = torch.tensor([[1.0, 30.0, 20.0], [30.0, 2.0, 29.98], [-5.0, -9.0, -5.0], [0.0, torch.nan, 1.0]])
    np.testing.assert_array_equal(likeliest_tokens(logits, lead=1e-3), [1, UNSURE, UNSURE, UNSURE])
    np.testing.assert_array_equal(likeliest_tokens(logits, lead=0.4), [UNSURE] * 4)


def test_a_lead_that_is_sure_does_not_become_so_by_moving_all_logits() -> None:
    logits = torch.tensor([[40.0, 39.0, *[0.0] * 30]])
    for moved in (0.0, -39.0, -80.0):
        np.testing.assert_array_equal(likeliest_tokens(logits + moved, lead=0.05), [UNSURE])


@pytest.mark.parametrize(
    ("precision", "experts", "expected"),
    [
        ("fp32", 0, 1e-3),
        ("fp32", 4, 1e-3),
        ("bf16_autocast", 0, 0.1),
        ("bf16_autocast", 4, None),
        ("bf16", 0, None),
    ],
)
def test_leads_are_sure_where_rounding_was_measured(
    precision: str, experts: int, expected: float | None
) -> None:
    model = SimpleNamespace(config=SimpleNamespace(num_local_experts=experts))
    opening = SimpleNamespace(precision=PRECISIONS[precision])
    assert sure_lead(model, opening) == expected  # type: ignore[arg-type]
