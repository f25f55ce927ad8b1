"""Exact match in an evaluation: the fraction of answers that greedy decoding reproduces."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import chat, train_step

from crosstune.config.load import make_config
from crosstune.core.events import Observers
from crosstune.data.batches.token_batch import Example, number_answers, pack_rows, pad_rows
from crosstune.models.locate import ModelFolder
from crosstune.planner.gather import make_plan
from crosstune.recipes.sft import SftRecipe
from crosstune.runs.open_parts import open_session

PAIRS = [("red", "warm"), ("blue", "cold"), ("green", "mild"), ("white", "plain"), ("black", "dark")]
Opened = tuple[SftRecipe, Any]


@pytest.fixture(
    scope="module",
    params=[
        {"backend": "cpu", "train_type": "full", "lr": 3e-3},
        {"backend": "cpu", "kernels": "fast", "lr": 1e-2},
        {"backend": "cpu", "kernels": "fast", "precision": "bf16_autocast", "lr": 1e-2},
        {"backend": "mlx", "train_type": "full", "lr": 3e-3},
    ],
    ids=str,
)
def opened(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Opened:
    """A model that has learned three of five answers, which are all evaluated."""
    if request.param["backend"] == "mlx":
        pytest.importorskip("mlx_lm", reason="the mlx extra is not installed")
    folder = tmp_path_factory.mktemp("data")
    rows = [chat(f"How is {colour}?", answer) for colour, answer in PAIRS]
    for name, kept in (("train", rows[:3] * 8), ("eval", rows)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    data = {"dataset": str(folder / "train.jsonl"), "eval_dataset": str(folder / "eval.jsonl")}
    asked = {"precision": "fp32"} | request.param | data
    config = make_config(model_name=str(tiny_model), eval_metric="exact_match", num_samples=2, **asked)
    plan = make_plan(config)
    recipe = SftRecipe(plan.config, model_folder=tiny_model)
    session = open_session(plan, ModelFolder(name=str(tiny_model), path=tiny_model, source="folder"))
    for _ in range(60):
        if train_step(session, recipe.micro_batches(0), lr=config.lr).loss < 0.02:
            break
    return recipe, session


def generated(recipe: SftRecipe, session: Any) -> list[bool]:
    """Whether greedy decoding writes each reference."""
    samples = recipe._answer(session, recipe.questions, Observers())
    return [sample.answer == sample.reference for sample in samples]


def test_exact_match_is_that_of_generation(opened: Opened) -> None:
    recipe, session = opened
    found = recipe.evaluate(session, observer=Observers())
    written = generated(recipe, session)
    assert written == [True, True, True, False, False]
    assert found.metrics["exact_match"] == sum(written) / len(written)
    assert [sample.answer == sample.reference for sample in found.samples] == [True, True]
    for place, example in enumerate(recipe.held_out or ()):
        alone = session.evaluate([pad_rows([example], pad_id=0)])
        assert alone.metrics["exact_match"] == written[place]


def test_packed_documents_count_one_by_one(opened: Opened) -> None:
    recipe, session = opened
    examples = list(recipe.held_out or ())
    packed = pack_rows([examples[:3], examples[3:]], pad_id=0)
    apart = session.evaluate([pad_rows(examples, pad_id=0)])
    found = session.evaluate([packed, pack_rows([[examples[4], examples[0]]], pad_id=0)])
    assert packed.is_packed and apart.metrics["exact_match"] == 0.6
    assert found.metrics["exact_match"] == pytest.approx(4 / 7)


def test_one_wrong_token_makes_an_answer_wrong(opened: Opened) -> None:
    recipe, session = opened
    first, *_ = recipe.held_out or ()
    [last] = np.flatnonzero(first.supervised)[-1:]
    tokens = first.tokens.copy()
    tokens[last] = (tokens[last] + 1) % 50
    wrong = dataclasses.replace(first, tokens=tokens)
    found = session.evaluate([pad_rows([first, wrong], pad_id=0)])
    assert found.metrics["exact_match"] == 0.5
    assert "exact_match" not in train_step(session, recipe.micro_batches(0), lr=0.0).metrics


def test_answers_are_numbered_over_rows_and_documents() -> None:
    def example(supervised: Sequence[int]) -> Example:
        return Example(tokens=np.arange(1, 5, dtype=np.int32), supervised=np.array(supervised, bool), index=0)

    two, none, one = example([0, 1, 0, 1]), example([0, 0, 0, 0]), example([0, 0, 0, 1])
    assert number_answers(pad_rows([two, none, one], pad_id=0)).tolist() == [0, 0, 1]
    assert number_answers(pack_rows([[two, one], [none, two]], pad_id=0)).tolist() == [0, 0, 1, 2, 2]
    assert number_answers(pad_rows([none], pad_id=0)).tolist() == []
