"""What the MLX engine asks of a task: a model, the arrays of a batch, a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn

from crosstune.config.plan import Plan
from crosstune.core.protocols import Array

Arrays = Mapping[str, mx.array]
MetricSums = Mapping[str, tuple[Any, Any]]
"""Name -> a sum and the weight it is over; the metric is their quotient over all batches and ranks."""


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What a model is built for."""

    plan: Plan
    dtype: mx.Dtype
    """Of the weights in memory."""
    folder: Path | None
    """The base model; None for a recipe without one."""
    base_name: str | None = None
    """The hub id of the base model, if it came from there."""
    trained: bool = True
    compiled: bool = False
    """Whether the step is compiled: arrays of few different shapes are then worth some padding."""


class MlxTask(Protocol):
    metric_names: Sequence[str]
    """Names of the metrics that `loss` returns."""

    def build(self, opening: Opening) -> nn.Module:
        """Return the model with its weights in memory. What stands still is frozen."""
        ...

    def arrays(self, batch: Any) -> Mapping[str, Array]:
        """Return the arrays of a batch that the loss reads. Called in a thread ahead of the step: no MLX in it."""
        ...

    def loss(self, model: nn.Module, arrays: Arrays) -> tuple[mx.array, MetricSums]:
        """Return the sum of losses over a batch, and the sums of its metrics."""
        ...


@runtime_checkable
class WritesModel(Protocol):
    """A task that writes its whole model itself, in the form that other tools read."""

    def write_model(self, model: nn.Module, folder: Path) -> None: ...


@runtime_checkable
class ChecksWeights(Protocol):
    """A task that checks, once the model is open, that what is trained is what the files of the base hold."""

    def check_weights(self, model: nn.Module, trained: Mapping[str, Any]) -> None: ...


@runtime_checkable
class ChecksBatches(Protocol):
    """A task whose model may not be able to read every batch. Called by every rank for every batch, so that none waits
    for one that refuses."""

    def check_batch(self, arrays: Arrays) -> None: ...


class Loss(Protocol):
    """The loss of an opened model."""

    def __call__(self, arrays: Arrays) -> tuple[mx.array, MetricSums]:
        """Return the loss alone."""
        ...

    def scaled(
        self, arrays: Arrays, weights: Mapping[str, mx.array], scale: mx.array
    ) -> tuple[mx.array, MetricSums]:
        """Return the loss times `scale`, to be differentiated by `weights`, which lie in the model."""
        ...


@runtime_checkable
class HasOwnGradient(Protocol):
    """A task that computes part of the gradient by hand, and so brings a `Loss` of its own."""

    def prepare_loss(self, model: nn.Module) -> Loss: ...


@dataclass(frozen=True)
class PlainLoss:
    """The loss of a task that leaves the gradient to MLX."""

    model: nn.Module
    loss: Callable[[nn.Module, Arrays], tuple[mx.array, MetricSums]]

    def __call__(self, arrays: Arrays) -> tuple[mx.array, MetricSums]:
        return self.loss(self.model, arrays)

    def scaled(
        self, arrays: Arrays, weights: Mapping[str, mx.array], scale: mx.array
    ) -> tuple[mx.array, MetricSums]:
        total, metrics = self.loss(self.model, arrays)
        return total * scale, metrics
