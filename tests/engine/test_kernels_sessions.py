"""Sessions with the fast layers: the same training as with the general layers, before and after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import find_nonfinite, short_batches, train_step

from crosstune.config.load import make_config
from crosstune.data.batches.token_batch import IGNORED, TokenBatch
from crosstune.loop.step import prepare_window
from crosstune.planner.gather import make_plan
from crosstune.recipes.judge.examples import JudgeBatch
from crosstune.recipes.judge.torch_parts import ScoreTokens
from crosstune.torch_engine.open import open_session


@pytest.fixture(scope="module")
def window(tiny_model: Path) -> list[TokenBatch]:
    return short_batches(tiny_model)


def open_tiny(folder: Path, kernels: str, **options: Any) -> Any:
    asked = {"backend": "cpu", "precision": "fp32", "model_name": str(folder), "kernels": kernels}
    return open_session(make_plan(make_config(**asked | options)), model_folder=folder)


def test_a_run_moves_between_fast_and_general_layers(tiny_model: Path, window: list[TokenBatch]) -> None:
    fast, general = open_tiny(tiny_model, "fast"), open_tiny(tiny_model, "general")
    assert fast.task.decoder is not None and general.task.decoder is None
    assert fast.trained_shapes() == general.trained_shapes()
    for _ in range(2):
        expected, found = (train_step(session, window, lr=1e-2) for session in (general, fast))
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    assert fast.evaluate(window).loss == pytest.approx(general.evaluate(window).loss, rel=1e-5)
    resumed = open_tiny(tiny_model, "general")
    resumed.import_state(fast.export_state())
    for _ in range(2):
        expected, found = (train_step(session, window, lr=1e-2) for session in (fast, resumed))
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    # Text comes from transformers' layers, over the same weights.
    assert fast.generate([[5, 6, 7]], max_new_tokens=4) == resumed.generate([[5, 6, 7]], max_new_tokens=4)


def test_rows_without_padding_are_the_same_training(tiny_model: Path, window: list[TokenBatch]) -> None:
    """As on a GPU that attends by document."""
    assert any(batch.has_padding for batch in window)
    dropping, padded = open_tiny(tiny_model, "fast"), open_tiny(tiny_model, "fast")
    assert not padded.task.decoder.drops_padding
    dropping.task.decoder.drops_padding = True
    for batch in window:
        arrays = dropping.task.arrays(batch)
        assert arrays["input_ids"].shape == batch.input_ids.shape
        assert ("unpadded_ids" in arrays) == batch.has_padding
        assert not batch.has_padding or arrays["unpadded_ids"].shape == (1, batch.num_tokens)
    for _ in range(2):
        expected, found = (train_step(session, window, lr=1e-2) for session in (padded, dropping))
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16", "kernels": "auto"},
        {"precision": "bf16", "kernels": "auto", "use_activation_cpu_offload": True},
        {"precision": "bf16", "kernels": "auto", "use_gradient_checkpointing": True},
        {"precision": "bf16_autocast", "kernels": "fast"},
        {"precision": "fp16_autocast", "kernels": "fast"},
        {"precision": "fp32", "kernels": "fast"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_a_gpu_trains_with_the_fast_layers_as_with_the_general_ones(
    tiny_model: Path, window: list[TokenBatch], options: dict[str, Any]
) -> None:
    """`auto` takes them in bf16; the other precisions are those in which nobody has measured them."""
    kernels = options["kernels"]
    others = {name: value for name, value in options.items() if name != "kernels"}
    fast = open_tiny(tiny_model, kernels, backend="cuda", **others)
    general = open_tiny(tiny_model, "general", backend="cuda", **others)
    assert fast.task.decoder is not None and general.task.decoder is None
    for _ in range(2):
        expected, found = (train_step(session, window, lr=1e-3) for session in (general, fast))
        assert found.loss == pytest.approx(expected.loss, rel=1e-2)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=5e-2)


@pytest.mark.parametrize("drops_padding", [False, True])
def test_a_layer_that_overflows_is_named(
    tiny_model: Path, window: list[TokenBatch], drops_padding: bool
) -> None:
    session = open_tiny(tiny_model, "fast")
    session.task.decoder.drops_padding = drops_padding
    session.model.model.layers[1].mlp.down_proj.base.weight.data[0, 0] = torch.inf
    assert "layers.1.mlp.down_proj" in find_nonfinite(session, window)
    assert session.task.decoder is not None


def test_a_batch_without_supervised_tokens_trains_nothing(tiny_model: Path, window: list[TokenBatch]) -> None:
    session = open_tiny(tiny_model, "fast")
    empty = replace(window[0], targets=np.full_like(window[0].targets, IGNORED))
    alone, both = (
        session.backward(prepare_window(session, batches)) for batches in (window[1:], [empty, *window[1:]])
    )
    assert both.loss == pytest.approx(alone.loss)


@pytest.mark.parametrize(("train_type", "quantizer"), [("lora", "fp8"), ("qlora", "bnb")])
def test_base_precision_reaches_the_layers(tiny_model: Path, train_type: str, quantizer: str) -> None:
    config = make_config(
        backend="cpu",
        precision="fp32",
        model_name=str(tiny_model),
        kernels="fast",
        train_type=train_type,
        base_precision="fp8",
    )
    plan = make_plan(config)
    session: Any = open_session(plan, model_folder=tiny_model)
    assert plan.quantizer == quantizer
    groups, last = session.task.decoder.groups(), len(session.task.decoder.layers) - 1
    assert {name for name, stacked in groups.items() if not stacked.in_fp8} == {
        "layers.0.down",
        f"layers.{last}.down",
    }
    stored = session.model.model.layers[last].mlp.down_proj.base
    assert isinstance(stored, torch.nn.Linear) == (quantizer == "fp8"), (
        "e4m3 weights would be too far off there"
    )


def test_divided_targets_of_a_judge(tiny_model: Path, window: list[TokenBatch]) -> None:
    losses = []
    for kernels, drops_padding in (("general", False), ("fast", False), ("fast", True)):
        config = make_config(backend="cpu", precision="fp32", model_name=str(tiny_model), kernels=kernels)
        session: Any = open_session(make_plan(config), model_folder=tiny_model, task=ScoreTokens())
        if drops_padding:
            session.task.decoder.drops_padding = True
        batch = next(batch for batch in window if batch.has_padding)
        shares = np.where(batch.targets != IGNORED, np.float32(0.25), np.float32(0.0))
        judged = JudgeBatch(
            **vars(batch),
            others=np.full_like(batch.targets, 9),
            shares=shares,
            scores=np.zeros(2, np.float32),
            ends=np.zeros(2, np.int32),
            by_rows=False,
        )
        losses.append(session.backward(prepare_window(session, [judged])))
    for found in losses[1:]:
        assert found.loss == pytest.approx(losses[0].loss, rel=1e-5)
        assert found.grad_norm == pytest.approx(losses[0].grad_norm, rel=1e-4)
