"""Sessions of a recipe's own task, on both engines: random numbers, metrics, and what a task may not do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support import train_step

from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.planner.gather import make_plan
from crosstune.process.ranks import check_metric_names
from crosstune.runs.open_parts import open_session

BACKENDS = ["cpu", "mlx"]
ROWS = [4, 1, 3]


@dataclass(frozen=True)
class Rows:
    x: np.ndarray

    @property
    def weight(self) -> int:
        return len(self.x)

    @property
    def num_tokens(self) -> int:
        return len(self.x)


class TorchTask:
    """A line of one weight, with dropout and noise; `metrics` is what the loss returns beside its sum."""

    metric_names = ("above", "mean")

    def __init__(self, *, layer: str = "dropout", extra: Mapping[str, Any] | None = None) -> None:
        self.layer, self.extra = layer, dict(extra or {})

    def build(self, context: Any) -> Any:
        import torch
        from torch import nn

        layers = {"dropout": nn.Dropout(0.5), "norm": nn.BatchNorm1d(4), "none": nn.Identity()}

        class Line(nn.Module):
            def __init__(self, layer: nn.Module) -> None:
                super().__init__()
                self.line, self.layer = nn.Linear(4, 1, bias=False), layer

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.line(self.layer(x))

        model = Line(layers[self.layer])
        model.load_state_dict({"line.weight": torch.ones(1, 4)}, strict=False)
        return model.to(context.device)

    def arrays(self, batch: Rows) -> dict[str, np.ndarray]:
        return {"x": batch.x}

    def loss(self, model: Any, tensors: Mapping[str, Any]) -> Any:
        import torch

        out = model(tensors["x"]) + 0.1 * torch.randn(len(tensors["x"]), 1)
        sums = {"above": ((out > 0).sum(), len(out)), "mean": (out.detach().to(torch.bfloat16).sum(), 2)}
        return (out**2).sum(), sums | self.extra


class MlxTask(TorchTask):
    def build(self, context: Any) -> Any:
        import mlx.core as mx
        import mlx.nn as nn

        layers = {"dropout": nn.Dropout(0.5), "norm": nn.BatchNorm(4), "none": nn.Identity()}

        class Line(nn.Module):
            def __init__(self, layer: nn.Module) -> None:
                super().__init__()
                self.line, self.layers = nn.Linear(4, 1, bias=False), [layer]

            def __call__(self, x: mx.array) -> mx.array:
                return self.line(self.layers[0](x))

        model = Line(layers[self.layer])
        model.line.weight = mx.ones((1, 4))
        return model

    def loss(self, model: Any, arrays: Mapping[str, Any]) -> Any:
        import mlx.core as mx

        out = model(arrays["x"]) + 0.1 * mx.random.normal((len(arrays["x"]), 1))
        sums = {"above": ((out > 0).sum(), len(out)), "mean": (out.sum(), 2)}
        return (out**2).sum(), sums | self.extra


def open_task(backend: str, *, task: dict[str, Any] | None = None, **options: Any) -> Any:
    config = make_config(
        backend=backend, precision="fp32", train_type="full", recipe="sft", model_name="none", **options
    )
    kind = MlxTask if backend == "mlx" else TorchTask
    return open_session(make_plan(config), None, task=kind(**(task or {})))


def window(step: int) -> list[Rows]:
    draw = np.random.default_rng(step)
    return [Rows(draw.normal(0, 1, (size, 4)).astype(np.float32)) for size in ROWS]


@pytest.mark.parametrize("backend", BACKENDS)
def test_evaluating_leaves_the_random_numbers_of_training_alone(backend: str) -> None:
    plain = open_task(backend)
    expected = [train_step(plain, window(step), lr=1e-2) for step in range(3)]
    evaluated = open_task(backend)  # one after the other: torch has one generator for all of a process
    for step in range(3):
        evaluated.evaluate(window(9))
        assert train_step(evaluated, window(step), lr=1e-2) == expected[step]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_evaluation_repeats_itself_and_drops_nothing(backend: str) -> None:
    session = open_task(backend)
    before = session.evaluate(window(9))
    assert session.evaluate(window(9)) == before
    without = open_task(backend, task={"layer": "none"})
    assert without.evaluate(window(9)).loss == before.loss
    train_step(session, window(0), lr=0.0)
    assert session.evaluate(window(9)) == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_continues_with_the_noise_that_would_have_followed(backend: str) -> None:
    session = open_task(backend)
    train_step(session, window(0), lr=1e-2)
    state = session.export_state()
    expected = [train_step(session, window(step), lr=1e-2) for step in (1, 2)]
    other = open_task(backend, seed=7)
    other.import_state(state)
    assert [train_step(other, window(step), lr=1e-2) for step in (1, 2)] == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_metrics_are_sums_over_their_own_weights(backend: str) -> None:
    session = open_task(backend, task={"layer": "none"})
    rows = [Rows(np.full((size, 4), 100.0, np.float32)) for size in ROWS]
    for metrics in (session.evaluate(rows).metrics, train_step(session, rows, lr=0.0).metrics):
        assert metrics["above"] == 1.0
        assert metrics["mean"] == pytest.approx(400 * sum(ROWS) / (2 * len(ROWS)), rel=1e-2)


def test_sums_of_metrics_are_counted_exactly() -> None:
    import torch

    from crosstune.torch_engine.task import DeviceTotals

    totals = DeviceTotals(["one"])
    for _ in range(1000):
        totals.add({"one": (torch.ones((), dtype=torch.bfloat16), 1)})
    assert totals.means() == {"one": 1.0}


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_task_may_not_do(backend: str) -> None:
    with pytest.raises(UserError, match="running statistics") as caught:
        open_task(backend, task={"layer": "norm"})
    assert "layer norm" in caught.value.do
    with pytest.raises(UserError, match="metric far, which it does not declare"):
        train_step(open_task(backend, task={"extra": {"far": (1.0, 1)}}), window(0), lr=0.1)


@pytest.mark.parametrize("name", ["loss", "step", "lr", "examples", "skipped"])
def test_a_metric_cannot_take_a_column_that_exists(name: str) -> None:
    with pytest.raises(UserError, match=f"cannot be called {name}"):
        check_metric_names(["close", name], weight_name="examples")
    check_metric_names(["close"], weight_name="examples")
