"""The loss of one micro-batch and its gradient, as a function without memory, compiled where that pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from crosstune.mlx_engine.adapters import AdaptedLinear
from crosstune.mlx_engine.losses import CausalLoss, Feed
from crosstune.mlx_engine.masters import put


class Gradients:
    def __init__(
        self, model: Any, loss: CausalLoss, adapters: Sequence[AdaptedLinear], *, compiled: bool
    ) -> None:
        self.model = model
        self.loss = loss
        self.adapters = adapters
        both = mx.value_and_grad(self._scaled_loss)
        self._both = mx.compile(both) if compiled else both

    def __call__(
        self, weights: Mapping[str, mx.array], feed: Feed, key: mx.array, *, scale: float
    ) -> tuple[mx.array, dict[str, mx.array]]:
        """The sum of losses times `scale`, and its gradient."""
        self.model.train()  # some models take kernels that have no gradient unless they know
        try:
            return self._both(dict(weights), feed.arrays(), key, mx.array(scale, dtype=mx.float32))
        finally:  # tracing leaves its own things in the model
            self.model.eval()
            put(self.model, weights)
            self._set_keys(None)

    def forward(self, feed: Feed, key: mx.array) -> mx.array:
        """The loss alone, with the dropout of a training step."""
        self._set_keys(key)
        try:
            return self.loss(feed)
        finally:
            self._set_keys(None)

    def _scaled_loss(
        self, weights: dict[str, mx.array], arrays: list[mx.array], key: mx.array, scale: mx.array
    ) -> mx.array:
        put(self.model, weights)
        self._set_keys(
            key
        )  # and no end to it here: layers that are computed again, after this, need it still
        feed = Feed.of(arrays)
        return self.loss.differentiable(replace(feed, counted=feed.counted * scale), weights)

    def _set_keys(self, key: mx.array | None) -> None:
        """A stream of its own for each adapter that drops."""
        dropping = [adapter for adapter in self.adapters if adapter.drops]
        keys = mx.random.split(key, len(dropping)) if key is not None and dropping else None
        for place, adapter in enumerate(dropping):
            adapter.set_stream(keys[place] if keys is not None else None)
