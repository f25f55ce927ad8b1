"""Answers that share a prompt in one row are computed as in separate rows: losses, gradients, all families, both engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fast_models import CONFIGS, gradients, make_model

from crosstune.data.batches.forked import Fork, ForkedBatch, fork_rows, key_layout, separate_rows
from crosstune.data.batches.token_batch import Example, TokenBatch
from crosstune.torch_engine.kernels.decoder import FastDecoder
from crosstune.torch_engine.tasks.causal_lm import CausalLM, ModelInput, can_share_prompts

WINDOWED = [name for name in CONFIGS if "window" in name or name.startswith(("gemma2", "gemma3", "phi3"))]


def make_fork(prompt: int, *answers: int, seed: int = 0) -> Fork:
    draw = np.random.default_rng(seed)
    start = draw.integers(3, 97, prompt)
    examples = []
    for number, length in enumerate(answers):
        answer = draw.integers(3, 97, length)
        answer[0] = 3 + number  # the rows differ from here on
        marks = np.arange(prompt + length) >= prompt
        examples.append(
            Example(tokens=np.append(start, answer).astype(np.int32), supervised=marks, index=number)
        )
    return Fork(tuple(examples))


ROWS = [[make_fork(13, 5, 9), make_fork(4, 3, 3, seed=1)], [make_fork(11, 2, 4, 6, seed=2)]]


def make_batch() -> ForkedBatch:
    """Two rows: one with two prompts, one with three answers; with padding."""
    return fork_rows(ROWS, pad_id=0)


def answers_apart() -> TokenBatch:
    """The same answers, each in a row with its prompt."""
    return separate_rows(fork_rows([[fork] for row in ROWS for fork in row], pad_id=0))


def losses(task: CausalLM, model: Any, batch: TokenBatch, device: str = "cpu") -> torch.Tensor:
    arrays = task.arrays(batch)
    given = ModelInput.of({name: torch.from_numpy(array).to(device) for name, array in arrays.items()})
    found, _ = task.token_losses(model, given)
    return found.new_zeros(int(given.answers.max()) + 1).index_add(0, given.answers, found)


def test_a_batch_of_forks() -> None:
    batch = make_batch()
    # 12 shared tokens of the first prompt, then both branches with its last token.
    assert batch.num_tokens == (12 + 6 + 10) + (3 + 4 + 4) + (10 + 3 + 5 + 7)
    first = batch.segments[0] == 1
    assert batch.positions[0, first].tolist() == [*range(12), *range(12, 18), *range(12, 22)]
    rows = answers_apart()
    assert rows.input_ids.shape[0] == 7 and separate_rows(batch).segments.max(axis=1).tolist() == [4, 3]
    assert (batch.targets != -100).sum() == (rows.targets != -100).sum() == 5 + 9 + 3 + 3 + 2 + 4 + 6


def test_rows_without_a_common_beginning_share_nothing() -> None:
    one, other = (make_fork(5, 3, seed=seed).examples[0] for seed in (1, 2))
    assert Fork((one, other)).num_shared == 0
    assert separate_rows(fork_rows([[Fork((one, other))]], pad_id=0)).input_ids[:, :8].tolist() == [
        one.tokens.tolist(),
        other.tokens.tolist(),
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_fast_layers(name: str) -> None:
    model, adapters = make_model(name)
    task = CausalLM()
    task.decoder = FastDecoder(model, dtype=torch.float32)
    batch = make_batch()
    weights = torch.linspace(-1, 1, 7)  # a loss may raise one answer and lower another
    expected = losses(task, model, answers_apart())
    by_rows = gradients((expected * weights).sum(), adapters)
    found = losses(task, model, batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    shared = gradients((found * weights).sum(), adapters)
    for part, gradient in by_rows.items():
        torch.testing.assert_close(shared[part], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_general_layers(name: str) -> None:
    model, adapters = make_model(name)
    task = CausalLM()
    task.shares_prompts = can_share_prompts(model, device=torch.device("cpu"))
    assert task.shares_prompts == (name not in WINDOWED)
    batch = make_batch()
    expected = losses(task, model, answers_apart())
    by_rows = gradients(expected.sum(), adapters)
    found = losses(task, model, batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for part, gradient in gradients(found.sum(), adapters).items():
        torch.testing.assert_close(gradient, by_rows[part], rtol=1e-4, atol=1e-5)


def test_the_layout_of_keys() -> None:
    batch = fork_rows([[make_fork(3, 2, 2)]], pad_id=0)
    query_bounds, key_bounds, keys = key_layout(
        ForkedBatch(
            **{name: array[:, :8] for name, array in vars(batch).items() if isinstance(array, np.ndarray)}
        )
    )
    assert query_bounds.tolist() == [0, 5, 8] and key_bounds.tolist() == [0, 5, 10]
    assert keys.tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 6, 7]


@pytest.mark.cuda
@pytest.mark.parametrize("name", CONFIGS)
def test_sequences_of_queries_and_keys_on_a_gpu(name: str) -> None:
    """In bf16, branches are sequences of torch's attention over documents; the difference is rounding."""
    model, adapters = make_model(name)
    model = model.to("cuda", torch.bfloat16)
    for adapter in adapters.values():
        adapter.lora_A.data, adapter.lora_B.data = adapter.lora_A.data.float(), adapter.lora_B.data.float()
    task = CausalLM()
    task.decoder = FastDecoder(model, dtype=torch.bfloat16)
    assert task.decoder.drops_padding
    batch = make_batch()
    expected = losses(task, model, answers_apart(), "cuda")
    by_rows = gradients(expected.sum(), adapters)
    found = losses(task, model, batch, "cuda")
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    shared = gradients(found.sum(), adapters)
    for part, gradient in by_rows.items():
        cosine = torch.nn.functional.cosine_similarity(shared[part].flatten(), gradient.flatten(), dim=0)
        assert cosine > 0.995, part


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_mlx(kind: str) -> None:
    mx = pytest.importorskip("mlx.core")
    from mlx_lm.utils import _get_classes

    from crosstune.data.batches.forked import split_forks
    from crosstune.mlx_engine.forks import can_share_prompts as can_share
    from crosstune.mlx_engine.forks import run_branches

    config = {
        "model_type": kind, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97, "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
        "tie_word_embeddings": True, "rope_theta": 10000.0,
    }  # fmt: skip
    mx.random.seed(0)
    kinds = _get_classes(config)
    model = kinds[0](kinds[1].from_dict(config))
    assert can_share(model)
    batch = make_batch()
    split = split_forks(batch)
    found = run_branches(
        model,
        model,
        prompts=mx.array(split.prompts),
        prompt_lengths=mx.array(split.prompt_lengths),
        branches=mx.array(split.branches),
        fork_of=mx.array(split.fork_of),
    )
    rows = answers_apart()
    expected = model(mx.array(rows.input_ids))
    a = np.array(found)[split.targets != -100]
    b = np.array(expected)[rows.targets != -100]
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
