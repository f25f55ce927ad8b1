"""Optimizers against independent references: a loop of transformers, PEFT and torch.optim, and Lion in numpy."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import train_step
from test_peft_parity import reference_model

from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.core.protocols import Session
from crosstune.data.batches.token_batch import Example, TokenBatch, pad_rows
from crosstune.models.locate import ModelFolder
from crosstune.planner.gather import make_plan
from crosstune.runs.open_parts import open_session as open_by_plan
from crosstune.torch_engine.session.optimizer import make_optimizer, set_learning_rate

HAS_MLX = importlib.util.find_spec("mlx_lm") is not None
BACKENDS = ["cpu", pytest.param("mlx", marks=pytest.mark.skipif(not HAS_MLX, reason="needs the mlx extra"))]
NUM_STEPS, LR, WD = 20, 2e-3, 0.1
CONSTANTS = {"adam_beta1": 0.7, "adam_beta2": 0.9, "adam_epsilon": 1e-4}


def open_session(backend: str, folder: Path, **options: Any) -> Session:
    asked = {"backend": backend, "precision": "fp32", "model_name": str(folder), "wd": WD, "seed": 3}
    asked |= {"lora_rank": 8, "lora_alpha": 16, "apply_gradient_clipping": False}
    model = ModelFolder(name=str(folder), path=folder, source="folder")
    return open_by_plan(make_plan(make_config(**(asked | options))), model)


def batches() -> list[TokenBatch]:
    random = np.random.default_rng(0)
    examples = [
        Example(tokens=random.integers(3, 200, 9).astype(np.int32), supervised=np.ones(9, bool), index=index)
        for index in range(6)
    ]
    return [pad_rows(examples[start : start + 3], pad_id=0) for start in (0, 3)]


def losses(session: Session) -> list[float]:
    return [train_step(session, [batches()[step % 2]], lr=LR).loss for step in range(NUM_STEPS)]


def reference_losses(folder: Path, optimizer: str) -> list[float]:
    model = reference_model(folder, "lora", 3, dtype=torch.float32).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[optimizer]
    update = kind(trained, lr=LR, betas=(0.7, 0.9), eps=1e-4, weight_decay=WD, foreach=False)
    found = []
    for step in range(NUM_STEPS):
        ids = torch.from_numpy(batches()[step % 2].input_ids[:, :9]).long()
        logits = model(input_ids=ids).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        update.step()
        update.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
def test_adams_constants_make_the_updates_of_torch_and_peft(
    backend: str, optimizer: str, tiny_model: Path
) -> None:
    found = losses(open_session(backend, tiny_model, optimizer=optimizer, **CONSTANTS))
    assert found == pytest.approx(reference_losses(tiny_model, optimizer), rel=1e-5)
    for name in (
        CONSTANTS if optimizer == "adamw" else ()
    ):  # each of them matters, so that the comparison can fail
        rest = {other: value for other, value in CONSTANTS.items() if other != name}
        without = losses(open_session(backend, tiny_model, optimizer=optimizer, **rest))
        assert abs(without[-1] / found[-1] - 1) > 1e-4, name


def test_the_fused_and_8_bit_variants_read_adams_constants(tiny_model: Path) -> None:
    expected = reference_losses(tiny_model, "adamw")
    fused = losses(open_session("cpu", tiny_model, optimizer="fused_adamw", **CONSTANTS))
    assert fused == pytest.approx(expected, rel=1e-5)
    pytest.importorskip("bitsandbytes")
    # Tensors of fewer than 4096 values keep fp32 moments, so this is close to exact.
    small = losses(open_session("cpu", tiny_model, optimizer="adamw_8bit", **CONSTANTS))
    plain = losses(open_session("cpu", tiny_model, optimizer="adamw_8bit"))
    assert abs(small[-1] - expected[-1]) < 0.1 * abs(plain[-1] - expected[-1])


def lion_in_numpy(start: np.ndarray, gradients: list[np.ndarray], *, decay: float) -> np.ndarray:
    """Algorithm 2 of Chen et al. 2023, in double precision."""
    weight, average = start.astype(np.float64), np.zeros(start.shape)
    for gradient in gradients:
        update = np.sign(0.9 * average + (1 - 0.9) * gradient)
        average = 0.99 * average + (1 - 0.99) * gradient
        weight = weight - LR * (update + decay * weight)
    return weight


@pytest.mark.parametrize("backend", BACKENDS)
def test_lion_is_that_of_its_paper(backend: str) -> None:
    random = np.random.default_rng(5)
    start = {"matrix": random.normal(size=(7, 5)), "norm": random.normal(size=6)}
    steps = [{n: random.normal(size=a.shape) * 0.1 for n, a in start.items()} for _ in range(NUM_STEPS)]
    if backend == "cpu":
        masters = {n: torch.tensor(a, dtype=torch.float32).requires_grad_() for n, a in start.items()}
        optimizer = make_optimizer(masters, make_config(optimizer="lion", wd=WD))
        set_learning_rate(optimizer, LR)
        for gradients in steps:
            for name, master in masters.items():
                master.grad = torch.tensor(gradients[name], dtype=torch.float32)
            optimizer.step()
        found = {name: master.detach().numpy() for name, master in masters.items()}
    else:
        import mlx.core as mx

        from crosstune.mlx_engine.optimizer import Adam, Optimizer

        weights = {name: mx.array(array.astype(np.float32)) for name, array in start.items()}
        adam = Adam(beta1=0.5, beta2=0.5, epsilon=1.0)
        rule = Optimizer("lion", weight_decay=WD, adam=adam)
        for gradients in steps:
            given = {name: mx.array(array.astype(np.float32)) for name, array in gradients.items()}
            weights = rule.step(weights, given, lr=LR)
        found = {name: np.array(array) for name, array in weights.items()}
    for name, decay in (("matrix", WD), ("norm", 0.0)):
        expected = lion_in_numpy(start[name], [gradients[name] for gradients in steps], decay=decay)
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["lion", "lion_8bit", "sgd", "adadelta", "adafactor"])
def test_adams_constants_are_rejected_for_another_optimizer(optimizer: str) -> None:
    with pytest.raises(UserError, match=f"--adam_beta2 does not apply to --optimizer {optimizer}") as caught:
        make_plan(make_config(optimizer=optimizer, adam_beta2=0.95, backend="cpu"))
    assert "remove --adam_beta2" in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [("adam_beta1", 1), ("adam_beta2", 1.0), ("adam_beta1", -0.1), ("adam_epsilon", 0), ("adam_epsilon", 2)],
)
def test_constants_that_break_adam_are_rejected(option: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{option} cannot be"):
        make_config(**{option: value})
