"""The torch engine beyond tests/engine/test_sessions.py: its precisions, devices, and files for other tools."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import train_step

from crosstune.config.load import make_config
from crosstune.config.resolve.plan import Plan
from crosstune.core.out_of_memory import OutOfMemory
from crosstune.data.batches.token_batch import TokenBatch, pad_rows, split_rows
from crosstune.data.render.rendering import encode_conversation
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.loop.step import prepare_window
from crosstune.planner.gather import make_plan
from crosstune.torch_engine.device import memory_errors
from crosstune.torch_engine.open import open_session as open_torch
from crosstune.torch_engine.session.session import TorchSession

TURNS = [
    [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": f"{word} it is, " * n}]
    for n, word in enumerate(["red", "green", "blue", "a much longer colour", "none", "white"], start=1)
]


def plan_for(model: Path, **options: Any) -> Plan:
    return make_plan(
        make_config(**({"backend": "cpu", "precision": "fp32", "model_name": str(model)} | options))
    )


def open_session(model: Path, **options: Any) -> TorchSession:
    return open_torch(plan_for(model, **options), model_folder=model)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_model)


@pytest.fixture(scope="module")
def examples(tokenizer: Tokenizer) -> list[Any]:
    return [encode_conversation(turns, tokenizer, index=i, whole=False) for i, turns in enumerate(TURNS)]


def batches(examples: list[Any], size: int) -> list[TokenBatch]:
    return list(split_rows(examples, batch_size=size, pad_id=0))


def gradients(session: TorchSession, window: list[TokenBatch]) -> dict[str, torch.Tensor]:
    session.backward(prepare_window(session, window))
    return {
        name: tensor.grad.clone()
        for name, tensor in session.masters.masters.items()
        if tensor.grad is not None
    }


@pytest.mark.parametrize("reentrant", [False, True])
def test_both_ways_of_checkpointing_give_the_gradients_bit_for_bit(
    tiny_model: Path, examples: list[Any], reentrant: bool
) -> None:
    plain = gradients(open_session(tiny_model), batches(examples, 3))
    options = {"use_gradient_checkpointing": True, "reentrant_checkpointing": reentrant}
    recomputed = gradients(open_session(tiny_model, **options), batches(examples, 3))
    assert recomputed.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("precision", "train_type"),
    [
        ("bf16", "full"),
        ("bf16_autocast", "lora"),
        ("bf16_buffers_autocast", "full"),
        ("fp16_autocast", "lora"),
    ],
)
def test_short_formats_train_with_masters_in_fp32(
    tiny_model: Path, examples: list[Any], precision: str, train_type: str
) -> None:
    session = open_session(tiny_model, precision=precision, train_type=train_type)
    exact = open_session(tiny_model, train_type=train_type)
    window = batches(examples, 3)
    for _ in range(12):
        loss = train_step(session, window, lr=3e-3).loss
        expected = train_step(exact, window, lr=3e-3).loss
        assert loss == pytest.approx(expected, rel=0.02)
    assert {master.dtype for master in session.masters.masters.values()} == {torch.float32}
    assert loss < 0.98 * open_session(tiny_model).evaluate(window).loss


def test_the_same_seed_gives_the_same_run_and_another_does_not(tiny_model: Path, examples: list[Any]) -> None:
    def losses(seed: int) -> list[float]:
        session = open_session(tiny_model, seed=seed, lora_dropout=0.2)
        return [train_step(session, batches(examples, 3), lr=1e-3).loss for _ in range(3)]

    assert losses(1) == losses(1)
    assert losses(1) != losses(2)


def logits_of(model: torch.nn.Module, batch: TokenBatch) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(batch.input_ids).long()).logits


def test_transformers_loads_the_model_as_it_is(tiny_model: Path, examples: list[Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    session = open_session(tiny_model, train_type="full")
    train_step(session, batches(examples, 3), lr=1e-3)
    folder = session.save_result(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = pad_rows(examples, pad_id=0)
    torch.testing.assert_close(logits_of(loaded, batch), logits_of(session.model, batch), rtol=0, atol=0)
    assert AutoTokenizer.from_pretrained(folder).chat_template


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("precision", "bound"), [("fp32", 1e-4), ("bf16", 2e-2), ("bf16_autocast", 2e-2), ("fp16", 2e-2)]
)
@pytest.mark.parametrize("train_type", ["lora", "full"])
def test_cuda_follows_the_cpu(
    tiny_model: Path, examples: list[Any], train_type: str, precision: str, bound: float
) -> None:
    reference = open_session(tiny_model, train_type=train_type)
    session = open_session(tiny_model, train_type=train_type, backend="cuda", precision=precision)
    window = batches(examples, 3)
    for _ in range(10):
        expected = train_step(reference, window, lr=1e-3).loss
        assert train_step(session, window, lr=1e-3).loss == pytest.approx(expected, rel=bound)
    assert session.memory().peak_bytes > 0


def test_the_processors_own_word_for_too_little_memory_is_understood() -> None:
    with pytest.raises(OutOfMemory, match="not enough memory"), memory_errors(torch.device("cpu")):
        torch.empty(2**60)
    with pytest.raises(RuntimeError, match="shapes"), memory_errors(torch.device("cpu")):
        torch.ones(2, 3) @ torch.ones(4, 5)


def test_an_evaluation_that_fails_leaves_the_model_training(
    tiny_model: Path, examples: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session(tiny_model, lora_dropout=0.2)
    [batch] = batches(examples, 6)
    bad = replace(batch, input_ids=batch.input_ids + 10**6)  # no such token
    with pytest.raises(IndexError):
        session.evaluate([bad])
    assert session.model.training
    with pytest.raises(IndexError):
        session.generate([[10**6]], max_new_tokens=2)
    assert session.model.training
    with pytest.raises(IndexError):
        session.logits([[10**6]])
    assert session.model.training


@pytest.mark.cuda
def test_batches_wait_in_pinned_memory(tiny_model: Path, examples: list[Any]) -> None:
    session = open_session(tiny_model, backend="cuda", precision="fp32")
    [batch] = batches(examples, 6)
    assert all(tensor.is_pinned() for tensor in session.prepare(batch).arrays.values())
