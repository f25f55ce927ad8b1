"""Compute loss and gradients of one micro-batch as a pure function, optionally compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from crosstune.mlx_engine.adapters import AdaptedLinear
from crosstune.mlx_engine.masters import put
from crosstune.mlx_engine.task import Arrays, Loss, MetricSums


class Gradients:
    def __init__(self, model: Any, loss: Loss, adapters: Sequence[AdaptedLinear], *, compiled: bool) -> None:
        self.model = model
        self.loss = loss
        self.adapters = adapters
        both = mx.value_and_grad(self._scaled_loss)
        self._both = mx.compile(both) if compiled else both

    def __call__(
        self, weights: Mapping[str, mx.array], arrays: Arrays, key: mx.array, *, scale: float
    ) -> tuple[mx.array, MetricSums, dict[str, mx.array]]:
        """Return the sum of losses times `scale`, the sums of metrics, and the gradients of the loss."""
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
        """Return the loss alone, with the dropout of a training step."""
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
