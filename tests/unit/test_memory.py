"""The estimate of a step's memory, held against arithmetic done by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from crosstune.config.facts import Facts
from crosstune.config.load import make_config
from crosstune.config.resolve import resolve
from crosstune.core.backend import backend_specs
from crosstune.core.memory import ModelShape, expand_shape, model_bytes
from crosstune.core.quantizers import read_quantizers
from crosstune.machines.probe import load_machine

SHAPE = ModelShape(
    num_parameters=1_000_000_000, hidden=2000, num_layers=30, num_heads=20, intermediate=6000, vocab=50_000
)
BLOCK = (1_000_000_000 - 50_000 * 2000) // 30


def estimate(**asked: Any) -> int:
    facts = Facts(
        machine=load_machine("h200"),
        backends=backend_specs(),
        quantizers=read_quantizers(),
        shape=SHAPE,
    )
    bytes_ = resolve(make_config(**asked), facts).estimated_bytes
    assert bytes_ is not None
    return bytes_


def test_new_blocks_are_trained_in_full() -> None:
    shape = expand_shape(SHAPE, 5)
    assert shape.num_layers == 35
    assert shape.num_parameters == 1_000_000_000 + 5 * BLOCK
    dense = model_bytes(shape, method="llama_pro", bits=16, rank=16, num_new_blocks=5)
    assert dense == pytest.approx(2 * shape.num_parameters + 16 * 5 * BLOCK, rel=1e-6)
    quantized = model_bytes(shape, method="llama_pro", bits=4, rank=16, num_new_blocks=5)
    kept = 50_000 * 2000 + 5 * BLOCK
    assert quantized == pytest.approx(
        2 * kept + (shape.num_parameters - kept) * 9 / 16 + 16 * 5 * BLOCK, rel=1e-6
    )


def test_llama_pro_is_not_estimated_as_lora() -> None:
    base = {"batch_size": 1, "context_length": 128}
    one, five = (estimate(train_type="llama_pro", num_new_blocks=n, **base) for n in (1, 5))
    assert five - one > 4 * BLOCK * 18  # weights in 16 bits, and 16 bytes to train each
    assert one > estimate(train_type="lora", lora_rank=1, **base) + 16 * BLOCK
    ranks = [estimate(train_type="llama_pro", lora_rank=rank, **base) for rank in (1, 64)]
    assert ranks[0] == ranks[1]


def test_a_folder_that_is_expanded_already_says_how_many_blocks_are_trained() -> None:
    named = estimate(train_type="llama_pro", llama_pro_path="/x/model_blk_exp-25-30", batch_size=1)
    fewer = estimate(train_type="llama_pro", llama_pro_path="/x/model_blk_exp-29-30", batch_size=1)
    assert named - fewer == pytest.approx(4 * BLOCK * 16, rel=1e-6)


def test_adapters_on_experts_are_counted() -> None:
    mixture = replace(SHAPE, num_experts=8, expert_intermediate=6000)
    gained = model_bytes(mixture, method="lora", bits=16, rank=4) - model_bytes(
        SHAPE, method="lora", bits=16, rank=4
    )
    one_expert = (2000 + 2 * 6000) + (6000 + 2000)
    assert gained == 16 * 4 * 30 * (8 * one_expert - 3 * (2000 + 6000))
