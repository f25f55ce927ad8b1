"""In packed rows, a document has the same loss and gradient as alone, for several kinds of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support import assert_same_gradients, tiny_config
from transformers import AutoModelForCausalLM

from crosstune.core.errors import UserError
from crosstune.data.batches.packing import pack
from crosstune.data.batches.token_batch import IGNORED, Example, TokenBatch, pack_rows, pad_rows
from crosstune.torch_engine.tasks.causal_lm import CausalLM, ensure_separates_documents

CPU = torch.device("cpu")
SHAPE = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
SHAPE |= {"pad_token_id": 0}
WINDOW = 7  # shorter than the documents, so that a sliding window is at work within them
HYBRIDS = (
    "qwen3_5",
    "qwen3_next",
    "granitemoehybrid",
    "nemotron_h",
    "falcon_h1",
    "lfm2",
    "jamba",
    "mamba",
    "gpt_oss",
)
KINDS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=16),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(**SHAPE, head_dim=16, sliding_window=WINDOW),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=WINDOW),
    "phi3": lambda: transformers.Phi3Config(**SHAPE),
} | {kind: lambda kind=kind: tiny_config(kind, 128) for kind in HYBRIDS}
EAGER_ONLY = ("gemma2", "mamba", "gpt_oss")


def causal_loss_sum(model: Any, batch: TokenBatch, *, device: torch.device) -> torch.Tensor:
    task = CausalLM()
    tensors = {name: torch.from_numpy(array).to(device) for name, array in task.arrays(batch).items()}
    return task.loss(model, tensors)[0]


def documents(lengths: list[int]) -> list[Example]:
    random = np.random.default_rng(0)
    return [
        Example(
            tokens=random.integers(3, 128, size=length).astype(np.int32),
            supervised=random.random(length) < 0.6,
            index=index,
        )
        for index, length in enumerate(lengths)
    ]


def make_model(kind: str) -> torch.nn.Module:
    torch.manual_seed(1)
    attention = "eager" if kind in EAGER_ONLY else "sdpa"
    return AutoModelForCausalLM.from_config(KINDS[kind](), attn_implementation=attention).float().train()


def only_document(batch: TokenBatch, row: int, segment: int) -> TokenBatch:
    """The same rows with the loss of one document alone."""
    targets = np.full_like(batch.targets, IGNORED)
    inside = batch.segments[row] == segment
    targets[row, inside] = batch.targets[row, inside]
    return TokenBatch(
        input_ids=batch.input_ids, targets=targets, segments=batch.segments, positions=batch.positions
    )


@pytest.mark.parametrize("kind", KINDS)
def test_each_document_has_the_loss_it_has_alone(kind: str) -> None:
    model = make_model(kind)
    examples = documents([11, 1, 17, 9, 24, 3, 20, 12])
    lengths = np.array([len(example.tokens) for example in examples])
    packed = pack(np.arange(len(examples)), lengths, capacity=40)
    rows = [[examples[int(d)] for d in packed.row(number)] for number in range(len(packed))]
    batch = pack_rows(rows, pad_id=0)
    assert batch.segments.max() > 2
    with torch.no_grad():
        for row, members in enumerate(rows):
            for segment, example in enumerate(members, start=1):
                together = float(causal_loss_sum(model, only_document(batch, row, segment), device=CPU))
                alone = float(causal_loss_sum(model, pad_rows([example], pad_id=0), device=CPU))
                assert together == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_unpacked_rows(kind: str) -> None:
    model = make_model(kind)
    examples = documents([11, 17, 9, 24, 3, 20])
    rows = [examples[:2], examples[2:4], examples[4:]]

    def gradients(batches: list[TokenBatch]) -> dict[str, torch.Tensor]:
        model.zero_grad()
        weight = sum(batch.weight for batch in batches)
        for batch in batches:
            (causal_loss_sum(model, batch, device=CPU) / weight).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    packed = gradients([pack_rows(rows, pad_id=0)])
    unpacked = gradients([pad_rows([example], pad_id=0) for example in examples])
    # A gated delta rule sums decays of both signs: its gradients round more than those of attention.
    assert_same_gradients(packed, unpacked, bound=1e-4 if kind.startswith("qwen3_") else 1e-5)


@pytest.mark.parametrize(
    "config",
    [
        transformers.OPTConfig(
            vocab_size=128, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=256, word_embed_proj_dim=64,
        ),
        transformers.FalconConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
        transformers.BloomConfig(vocab_size=128, hidden_size=64, n_layer=2, n_head=4),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_models_that_look_over_the_border_are_refused(config: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(UserError, match="packing cannot be used"):
        ensure_separates_documents(model, device=CPU)
