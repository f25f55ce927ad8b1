"""The predicted memory of steps on pictures: tower and projector, frozen or trained, and the pixel budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from crosstune.estimate.memory import step_parts, weight_bytes
from crosstune.estimate.model_shape import ModelShape, Step, trained_parameters
from crosstune.estimate.vision import FAMILIES, Vision, read_tower

SIGLIP: dict[str, Any] = {
    "model_type": "gemma3",
    "vision_config": {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "patch_size": 14, "image_size": 896
    },
}  # fmt: skip
PROJECTOR = 3_000_000


def shape() -> ModelShape:
    """Gemma 3 4B."""
    tower = read_tower(SIGLIP)
    assert tower is not None
    own = tower.num_parameters
    return ModelShape(
        num_parameters=3_880_000_000 + own + PROJECTOR, hidden=2560, num_layers=34, intermediate=10240, vocab=262208,
        num_heads=8, num_kv_heads=4, head_dim=256, tied=True,
        tower=replace(tower, num_parameters=own + PROJECTOR, projector=PROJECTOR),
    )  # fmt: skip


STEP = Step(batch=4, context=1023, supervised=481, patches=2 * 4096, checkpointing=True)


def test_the_sizes_of_a_tower() -> None:
    tower = read_tower(SIGLIP)
    assert tower is not None
    assert tower.num_parameters == pytest.approx(27 * (4 * 1152**2 + 2 * 1152 * 4304), rel=0.01)
    assert tower.input_bytes(4096) == 4 * 3 * 896 * 896
    assert read_tower({"model_type": "llama"}) is None


def test_a_frozen_tower_keeps_its_input_alone() -> None:
    """The logits and activations of the language model are the same with and without pictures."""
    seen, unseen = step_parts(shape(), STEP), step_parts(shape(), replace(STEP, patches=0))
    assert seen.total - unseen.total == 4 * 4 * 2 * 3 * 896 * 896
    assert (seen.activations, seen.logits) == (unseen.activations, unseen.logits)


def test_a_trained_tower_keeps_activations_for_each_patch() -> None:
    frozen, trained = shape(), replace(STEP, trains_tower=True)
    more = step_parts(frozen, trained).activations - step_parts(frozen, STEP).activations
    assert more >= 27 * 4 * STEP.patches * 1152 * 2, "the inputs of the layers in 16 bits"
    kept = step_parts(frozen, replace(trained, checkpointing=False)).activations
    assert kept > step_parts(frozen, trained).activations + more
    halved = replace(trained, patches=4096)
    assert step_parts(frozen, halved).activations < step_parts(frozen, trained).activations


def test_parameters_that_pictures_add() -> None:
    found = shape()
    assert found.tower is not None
    language = trained_parameters(found, STEP)
    assert trained_parameters(found, replace(STEP, trains_projector=True)) == language + PROJECTOR
    assert trained_parameters(found, replace(STEP, trains_tower=True)) == language + found.tower.adapters(16)
    full = replace(STEP, method="full")
    assert trained_parameters(found, full) == found.language_parameters
    everything = replace(full, trains_tower=True, trains_projector=True)
    assert trained_parameters(found, everything) == found.num_parameters


def test_towers_are_never_quantized() -> None:
    found = shape()
    assert found.tower is not None
    quantized = replace(STEP, quantizer="bnb", n_bits=4)
    text = replace(found, num_parameters=found.language_parameters, tower=None)
    assert weight_bytes(found, quantized) - weight_bytes(text, quantized) == 2 * found.tower.num_parameters


@pytest.mark.parametrize(
    ("family", "sizes", "tokens"),
    [
        ("qwen2_5_vl", {"patch": 14, "merge": 2, "fewest_pixels": 3136, "most_pixels": 1 << 24}, [1024, 256, 256]),
        ("idefics3", {"patch": 14, "tile": 364, "longest": 1456, "num_soft": 169}, [2873, 845, 845]),
        ("gemma3", {"patch": 14, "tile": 896, "num_soft": 256}, [256, 256, 256]),
    ],
)  # fmt: skip
def test_a_budget_of_pixels(family: str, sizes: dict[str, Any], tokens: list[int]) -> None:
    """For a picture of 896 x 896 pixels: without a budget, with a quarter of it, and for a larger picture with the same."""
    soft = FAMILIES[family].soft_token
    vision = Vision(family=FAMILIES[family], soft_id=1, **sizes)
    budget = vision.limited(
        896 * 896 if family == "gemma3" else 728 * 728 if family == "idefics3" else 448 * 448
    )

    def count(which: Vision, side: int) -> int:
        return sum(times for text, times in which.pieces(side, side) if text == soft)

    assert [count(vision, 896), count(budget, 896), count(budget, 3000)] == tokens
    assert budget.num_patches(896, 896) <= vision.num_patches(896, 896)
