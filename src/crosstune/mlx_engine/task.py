"""Define tasks of the MLX engine (a model, the arrays of a batch, a loss), and compute their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn

from crosstune.config.resolve.plan import Plan
from crosstune.core.protocols import Array
from crosstune.mlx_engine.expert_adapters import Adapter
from crosstune.mlx_engine.optimizer import put

Arrays = Mapping[str, mx.array]
MetricSums = Mapping[str, tuple[Any, Any]]
"""Name -> (sum, weight); the metric is their quotient over all batches and ranks."""


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """The arguments of `MlxTask.build`."""

    plan: Plan
    dtype: mx.Dtype
    """Dtype of the weights in memory."""
    folder: Path | None
    """The folder of the base model; None for a recipe without one."""
    base_name: str | None = None
    """The hub id of the base model, if it came from there."""
    trained: bool = True
    compiled: bool = False
    """True if steps are compiled; padding arrays to a few shapes then avoids recompilation."""


class MlxTask(Protocol):
    metric_names: Sequence[str]
    """Names of the metrics that `loss` returns."""

    def build(self, opening: BuildContext) -> nn.Module:
        """Return the model with its weights in memory; freeze weights that are not trained."""
        ...

    def arrays(self, batch: Any) -> Mapping[str, Array]:
        """Return the arrays of a batch for the loss. Runs in a prefetch thread, so it must not use MLX."""
        ...

    def loss(self, model: nn.Module, arrays: Arrays) -> tuple[mx.array, MetricSums]:
        """Return the loss, summed over a batch, and the sums of its metrics."""
        ...


@runtime_checkable
class HasOwnHead(Protocol):
    """A task whose head is trained in full, even with adapters on the other layers. Its result is a merged model."""

    head_names: Sequence[str]
    """The canonical names of the head's parameters."""


@dataclass(eq=False)
class Loss:
    """The loss of an opened model, differentiated by MLX."""

    model: nn.Module
    loss: Callable[[nn.Module, Arrays], tuple[mx.array, MetricSums]]

    def __call__(self, arrays: Arrays) -> tuple[mx.array, MetricSums]:
        return self.loss(self.model, arrays)

    def scaled(
        self, arrays: Arrays, weights: Mapping[str, mx.array], scale: mx.array
    ) -> tuple[mx.array, MetricSums]:
        """Return the loss times `scale`, differentiable with respect to `weights` of the model."""
        total, metrics = self.loss(self.model, arrays)
        return total * scale, metrics


class Gradients:
    """Compute loss and gradients of a model, compiled or not."""

    def __init__(self, model: Any, loss: Loss, adapters: Sequence[Adapter], *, compiled: bool) -> None:
        self.model = model
        self.loss = loss
        self.adapters = adapters
        both = mx.value_and_grad(self._scaled_loss)
        self._both = mx.compile(both) if compiled else both

    def __call__(
        self, weights: Mapping[str, mx.array], arrays: Arrays, key: mx.array, *, scale: float
    ) -> tuple[mx.array, MetricSums, dict[str, mx.array]]:
        """Return the summed loss times `scale`, the sums of metrics, and the gradients."""
        self.model.train()  # in eval mode some models use kernels without a gradient
        try:
            (loss, metrics), gradients = self._both(
                dict(weights), dict(arrays), key, mx.array(scale, dtype=mx.float32)
            )
        finally:  # tracing leaves tracer arrays in the model
            self.model.eval()
            put(self.model, weights)
            self._set_keys(None)
        return loss, metrics, gradients

    def forward(self, arrays: Arrays, key: mx.array) -> mx.array:
        """Return the loss of a training step, with dropout and without gradients."""
        self._set_keys(key)
        self.model.train()
        try:
            loss, _ = self.loss(arrays)
            mx.eval(loss)
            return loss
        finally:
            self.model.eval()
            self._set_keys(None)

    def _scaled_loss(
        self, weights: dict[str, mx.array], arrays: dict[str, mx.array], key: mx.array, scale: mx.array
    ) -> tuple[mx.array, MetricSums]:
        put(self.model, weights)
        # Keep the keys: layers recomputed in the backward pass still need them.
        self._set_keys(key)
        return self.loss.scaled(arrays, weights, scale)

    def _set_keys(self, key: mx.array | None) -> None:
        """Give each adapter with dropout its own random key."""
        dropping = [adapter for adapter in self.adapters if adapter.drops]
        keys = mx.random.split(key, len(dropping)) if key is not None and dropping else None
        for index, adapter in enumerate(dropping):
            adapter.set_stream(keys[index] if keys is not None else None)
