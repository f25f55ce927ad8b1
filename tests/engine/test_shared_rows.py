"""Training on rows that begin alike: the common tokens are computed once, and losses and gradients stay those of rows of
their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_of

from crosstune.config.load import make_config
from crosstune.core.ranks import SingleProcess
from crosstune.data.batches import pad_rows
from crosstune.data.rendering import encode_conversation
from crosstune.data.token_batch import TokenBatch
from crosstune.data.tokenizer import Tokenizer
from crosstune.loop.step import prepare_window
from crosstune.planner.gather import make_plan
from crosstune.recipes.judge.torch_parts import ScoreTokens
from crosstune.recipes.sft import SftRecipe
from crosstune.runs import find_batch
from crosstune.torch_engine.open import open_session as open_torch
from crosstune.torch_engine.session import TorchSession
from crosstune.torch_engine.tasks.causal_lm import SHARING_MODELS

SYSTEM = {"role": "system", "content": "You turn every request into one word, and you write that word alone."}
WORDS = ["red", "green and blue", "a much longer colour", "none", "white"]


@pytest.fixture(scope="module")
def batch(tiny_model: Path) -> TokenBatch:
    tokenizer = Tokenizer.from_folder(tiny_model)
    turns = [
        [SYSTEM, {"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": word * 2}]
        for word in WORDS
    ]
    return pad_rows(
        [encode_conversation(each, tokenizer, index=i, whole=False) for i, each in enumerate(turns)], pad_id=0
    )


def open_session(model: Path, **options: Any) -> TorchSession:
    asked = {"backend": "cpu", "precision": "fp32", "kernels": "general", "model_name": str(model)} | options
    return open_torch(make_plan(make_config(**asked)), model_folder=model)


def shares(session: TorchSession, batch: TokenBatch) -> bool:
    return "seen" in session.prepare(batch).arrays


def loss_and_gradients(session: TorchSession, batch: TokenBatch) -> tuple[float, dict[str, torch.Tensor]]:
    done = session.backward(prepare_window(session, [batch]))
    masters = session.masters.masters
    return done.loss, {name: each.grad.clone() for name, each in masters.items() if each.grad is not None}


@pytest.mark.parametrize(
    "options", [{"train_type": "lora"}, {"train_type": "full"}, {"kernels": "fast"}], ids=str
)
@pytest.mark.parametrize("family", SHARING_MODELS)
def test_losses_and_gradients_are_those_of_rows_of_their_own(
    tiny_model: Path, tmp_path: Path, batch: TokenBatch, family: str, options: dict[str, Any]
) -> None:
    vocab = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    folder = tiny_of(family, tmp_path / family, vocab)
    session = open_session(folder, **options)
    assert shares(session, batch)
    assert session.prepare(batch).arrays["input_ids"].numel() < 0.8 * batch.input_ids.size
    loss, gradients = loss_and_gradients(session, batch)
    evaluated = session.evaluate([batch]).loss
    apart = open_session(folder, **options)
    apart.task._shares_prefixes = False  # type: ignore[attr-defined]
    assert not shares(apart, batch)
    expected, wanted = loss_and_gradients(apart, batch)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert evaluated == pytest.approx(expected, rel=1e-6)
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kernels", ["general", "fast"])
def test_16_bit_products_of_shared_rows_are_as_near_to_fp32_as_those_of_rows_of_their_own(
    tiny_model: Path, batch: TokenBatch, kernels: str
) -> None:
    exact, wanted = loss_and_gradients(open_session(tiny_model), batch)
    apart = open_session(tiny_model, precision="bf16_autocast", kernels=kernels)
    apart.task._shares_prefixes = False  # type: ignore[attr-defined]
    together = open_session(tiny_model, precision="bf16_autocast", kernels=kernels)
    assert shares(together, batch) and not shares(apart, batch)
    far = {}
    for name, session in (("apart", apart), ("together", together)):
        loss, gradients = loss_and_gradients(session, batch)
        assert loss == pytest.approx(exact, rel=2e-3)
        squares = [(gradients[each] - wanted[each]).square().sum() for each in wanted]
        far[name] = float(sum(squares) / sum(each.square().sum() for each in wanted.values())) ** 0.5
    assert far["together"] < 1.5 * far["apart"] < 0.05


@pytest.mark.parametrize(
    "options",
    [{"precision": "bf16"}, {"lora_dropout": 0.1}, {"kernels": "fast", "base_precision": "fp8"}],
    ids=str,
)
def test_other_options_compute_rows_of_their_own(
    tiny_model: Path, batch: TokenBatch, options: dict[str, Any]
) -> None:
    assert not shares(open_session(tiny_model, **options), batch)


@pytest.mark.parametrize("kernels", ["general", "fast"])
def test_a_window_that_a_llama_does_not_use_changes_nothing(
    tiny_model: Path, tmp_path: Path, batch: TokenBatch, kernels: str
) -> None:
    vocab = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    folder = tiny_of("llama", tmp_path / "llama", vocab)
    expected, _ = loss_and_gradients(open_session(folder, kernels=kernels), batch)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"sliding_window": 8}))
    assert loss_and_gradients(open_session(folder, kernels=kernels), batch)[0] == expected


def test_models_with_windows_compute_rows_of_their_own(
    tiny_model: Path, tmp_path: Path, batch: TokenBatch
) -> None:
    vocab = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    assert not shares(open_session(tiny_of("mistral", tmp_path / "mistral", vocab)), batch)


def test_a_batch_size_is_searched_with_rows_of_their_own(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest rows may begin alike where others do not, and need less memory then."""
    plan = make_plan(make_config(backend="cpu", precision="fp32", model_name=str(tiny_model)))
    recipe = SftRecipe(plan.config, model_folder=tiny_model)
    tasks: list[Any] = []

    def open_nothing(*_: Any, task: Any, **__: Any) -> None:
        tasks.append(task)
        raise InterruptedError

    monkeypatch.setattr(find_batch, "open_session", open_nothing)
    with pytest.raises(InterruptedError):
        find_batch._search(plan, model=None, recipe=recipe, group=SingleProcess())
    assert [task.may_share_prefixes for task in tasks] == [False]
    assert recipe.task("torch").may_share_prefixes  # type: ignore[attr-defined]


def test_judges_compute_rows_of_their_own() -> None:
    assert not ScoreTokens.may_share_prefixes
