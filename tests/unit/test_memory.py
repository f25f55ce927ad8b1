"""The predicted memory of a step, compared with arithmetic by hand and with measured steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planned import plan_on

from crosstune.estimate.fast_layers import LayerBytes, plan_recomputation
from crosstune.estimate.memory import (
    EXPERTS_AT_ONCE_BYTES,
    GIB,
    copy_bytes,
    dense_copies,
    layer_bytes,
    loss_bytes,
    moment_bytes,
    step_bytes,
    step_parts,
    weight_bytes,
)
from crosstune.estimate.model_shape import (
    ModelShape,
    Step,
    block_parameters,
    expand_shape,
    trained_parameters,
)
from crosstune.models.known_models import known_shape, table

SHAPE = ModelShape(
    num_parameters=1_000_000_000, hidden=2000, num_layers=30, num_heads=20, intermediate=6000, vocab=50_000
)
BLOCK = (1_000_000_000 - 2 * 50_000 * 2000) // 30


def estimate(**asked: Any) -> int:
    bytes_ = plan_on("h200", shape=SHAPE, **asked).estimated_bytes
    assert bytes_ is not None
    return bytes_


def test_new_blocks_are_trained_in_full() -> None:
    shape = expand_shape(SHAPE, 5)
    assert shape.num_layers == 35 and block_parameters(SHAPE) == BLOCK
    assert shape.num_parameters == 1_000_000_000 + 5 * BLOCK
    step = Step(method="llama_pro", num_new_blocks=5)
    trained = trained_parameters(shape, step)
    assert trained == pytest.approx(5 * BLOCK, rel=1e-6)
    assert weight_bytes(shape, step) == 2 * shape.num_parameters
    assert copy_bytes(step, trained) == 4 * trained, "fp32 copies of 16-bit weights"
    quantized = weight_bytes(shape, replace(step, quantizer="bnb", n_bits=4))
    kept = 2 * 50_000 * 2000 + trained
    bits = 4 + (8 + 32 / 256) / 64
    assert quantized == pytest.approx(2 * kept + (shape.num_parameters - kept) * bits / 8, rel=1e-6)


def test_llama_pro_is_not_estimated_as_lora() -> None:
    base = {"batch_size": 1, "context_length": 128}
    one, five = (estimate(train_type="llama_pro", num_new_blocks=n, **base) for n in (1, 5))
    assert five - one > 4 * BLOCK * 18  # weights in 16 bits, and 16 bytes to train each
    ranks = [estimate(train_type="llama_pro", lora_rank=rank, **base) for rank in (1, 64)]
    assert ranks[0] == ranks[1]


def test_a_folder_that_is_expanded_already_says_how_many_blocks_are_trained() -> None:
    named = estimate(train_type="llama_pro", llama_pro_path="/x/model_blk_exp-25-30", batch_size=1)
    fewer = estimate(train_type="llama_pro", llama_pro_path="/x/model_blk_exp-29-30", batch_size=1)
    assert named - fewer >= 4 * BLOCK * 12


def test_adapters_on_experts_are_counted() -> None:
    mixture = replace(SHAPE, num_experts=8, expert_intermediate=6000)
    gained = trained_parameters(mixture, Step(rank=4)) - trained_parameters(SHAPE, Step(rank=4))
    one_expert = (2000 + 2 * 6000) + (6000 + 2000)  # gate and up share one A
    assert gained == 4 * 30 * (8 * one_expert - 3 * (2000 + 6000))


def test_experts_keep_their_input_and_are_dequantized_in_parts() -> None:
    mixture = replace(SHAPE, num_experts=64, expert_intermediate=1000, experts_per_token=4)
    step = Step(quantizer="bnb", n_bits=4, targets="attention", batch=2, context=512)
    few, many = (layer_bytes(replace(mixture, experts_per_token=n), step) for n in (4, 8))
    assert many - few == 2 * 1024 * 4 * 2 * 1000, "only the output of gate and up grows with the rows"
    assert dense_copies(mixture, step) == 2 * 64 * 2 * 1000 * 2000
    assert dense_copies(replace(mixture, num_experts=999), step) == EXPERTS_AT_ONCE_BYTES
    assert dense_copies(mixture, replace(step, on_gpu=False)) == 2 * 2 * 1000 * 2000


@pytest.mark.parametrize(
    ("targets", "widths"),
    [
        ("all", 4 * 4000 + 3 * 8000),
        ("attention", 4 * 4000),
        ("default", 2 * 4000),
        ("q_proj,down_proj", 4000 + 8000),
    ],
)
def test_only_the_chosen_layers_get_adapters(targets: str, widths: int) -> None:
    assert trained_parameters(SHAPE, Step(rank=2, targets=targets)) == 2 * 30 * widths


# Tensors that the engine keeps for the backward pass of one layer, counted on the CPU while it trained a Llama model
# of hidden 64, MLP 176, 4 heads of 16, 2 of them for keys; per token.
COUNTED = {
    "LoRA fp32": (
        Step(rank=4, compute_bits=32, weight_bits=32),
        4 * (4 * 64 + 4 * 176 + 2 * 64 + 2 * 32 + 7 * 4) + 16,
    ),
    "LoRA bf16": (Step(rank=4), 2 * 4 * 64 + 2 * (2 * 64 + 4 * 176 + 2 * 64 + 2 * 32 + 7 * 4) + 16),
    "full fp32": (
        Step(method="full", compute_bits=32, weight_bits=32),
        4 * (6 * 64 + 4 * 176 + 2 * 64 + 2 * 32) + 16,
    ),
    "LoRA autocast": (
        Step(rank=4, weight_bits=32),
        2 * 4 * 64 + 2 * (5 * 64 + 4 * 176 + 2 * 64 + 2 * 32 + 7 * 4) + 16,
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_layer_keeps_what_was_counted(name: str) -> None:
    step, per_token = COUNTED[name]
    shape = ModelShape(
        num_parameters=10**6,
        hidden=64,
        num_layers=3,
        intermediate=176,
        vocab=1000,
        num_heads=4,
        num_kv_heads=2,
    )
    assert layer_bytes(shape, replace(step, batch=2, context=64)) == 128 * per_token


def test_logits_are_counted_at_once_or_in_parts() -> None:
    few, many = (Step(batch=1, context=n, compute_bits=32) for n in (300, 1000))
    assert loss_bytes(SHAPE, few) == 12 * 300 * 50_000
    assert loss_bytes(SHAPE, many) == 8 * 1000 * 50_000 + 8 * 2**24
    assert loss_bytes(SHAPE, replace(many, supervised=10)) == 12 * 10 * 50_000


def test_the_optimizer_makes_a_difference() -> None:
    sizes = [
        moment_bytes(1000, name) for name in ("sgd", "adafactor", "lion_8bit", "adamw_8bit", "lion", "adamw")
    ]
    assert sizes == sorted(sizes) and sizes[0] == 0 and sizes[-1] == 8000
    by_optimizer = [
        estimate(train_type="full", optimizer=name, batch_size=1, context_length=64)
        for name in ("sgd", "adamw")
    ]
    assert by_optimizer[1] - by_optimizer[0] == 8 * SHAPE.num_parameters


# Peaks of torch's allocator on one H200 with 4 x 2048 tokens and adapters of rank 16 on all seven linear layers.
LLAMA = "meta-llama/Llama-2-7b-hf"
NF4: dict[str, Any] = {"quantizer": "bnb", "n_bits": 4}
FP8: dict[str, Any] = {"quantizer": "fp8", "n_bits": 16, "fp8_products": True}
MEASURED: list[tuple[dict[str, Any], float, float]] = [
    # settings, GiB, how far the prediction may be off
    ({**NF4, "checkpointing": True}, 7.8, 0.1),
    ({"fast": True}, 41.2, 0.01),
    ({"fast": True, **FP8}, 41.4, 0.01),
    # Measured with both summands of each layer's input; one of them, 64 MiB, is not kept since.
    ({"fast": True, "checkpointing": True}, 19.0 - 32 * 64 / 1024, 0.01),
]


def peak_gib(**settings: Any) -> float:
    shape = known_shape(LLAMA)
    assert shape is not None
    return step_bytes(shape, Step(batch=4, context=2048, **settings)) / GIB


@pytest.mark.parametrize(("settings", "measured_gib", "error"), MEASURED)
def test_measured_peaks_are_predicted(settings: dict[str, Any], measured_gib: float, error: float) -> None:
    assert peak_gib(**settings) == pytest.approx(measured_gib, rel=error)


def test_nf4_saves_the_fast_layers_what_was_measured() -> None:
    """46.5 GiB in bf16 and 37.7 in NF4, of layers that kept the gated product too."""
    assert peak_gib(fast=True) - peak_gib(fast=True, **NF4) == pytest.approx(46.5 - 37.7, rel=0.02)


@pytest.mark.parametrize("settings", [{}, NF4, FP8], ids=["bf16", "NF4", "fp8"])
def test_fast_layers_recompute_until_the_step_fits(settings: dict[str, Any]) -> None:
    most, least = peak_gib(fast=True, **settings), peak_gib(fast=True, checkpointing=True, **settings)
    found = []
    for limit_gib in range(int(least) + 1, int(most / 0.8)):
        found.append(peak_gib(fast=True, limit_bytes=limit_gib * GIB, **settings))
        assert found[-1] <= limit_gib
    assert found[-1] == most and found[1:] == sorted(found[1:])
    assert peak_gib(fast=True, limit_bytes=GIB, **settings) == least, "they cannot do more than recompute all"


def test_fast_layers_need_room_for_adapters_of_any_rank() -> None:
    narrow, wide = (peak_gib(fast=True, rank=rank) for rank in (16, 64))
    trained = 4 * 40_000_000 * 3 / GIB  # 48 more of rank, in fp32: as many times the 40M weights of rank 16
    assert wide - narrow > 3 * trained
    attention = peak_gib(fast=True, targets="attention")
    assert attention < narrow


def test_recomputation_fills_the_memory_and_no_more() -> None:
    cost = LayerBytes(none=10, lean=6, full=1)

    def plan(free: int, working: int = 0) -> list[str]:
        return list(
            plan_recomputation(cost, num_layers=4, num_tokens=100, free_bytes=free, working_bytes=working)
        )

    assert plan(5000) == ["none"] * 4
    assert plan(4000) == ["lean"] * 4
    assert plan(2800) == ["full"] * 2 + ["lean"] * 2
    assert plan(100) == ["full"] * 4
    assert plan(5000, working=1000) == ["none"] * 4 and plan(5000, working=1001) == ["lean"] * 4


def test_parts_add_up_and_more_rows_take_more() -> None:
    one, two = (step_parts(SHAPE, Step(batch=n)) for n in (1, 2))
    assert one.total == sum(one.to_json().values()) < two.total
    assert one.weights == two.weights == 2 * SHAPE.num_parameters
    sharded = step_parts(SHAPE, Step(num_shards=8))
    assert sharded.weights == one.weights // 8 and sharded.optimizer < one.optimizer


def test_every_model_of_the_table_has_the_parameters_that_its_authors_give() -> None:
    assert len(table()) >= 100
    for name, fields in table().items():
        shape = known_shape(name)
        assert shape is not None
        assert shape.num_parameters / 1e9 == pytest.approx(float(fields[8]), rel=0.015), name
