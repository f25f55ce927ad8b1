"""Losses that recipes compute from the logits of the supervised tokens, with the logits in chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import mlx.core as mx
from mlx.utils import tree_flatten

from crosstune.mlx_engine.adapters import canonical_name
from crosstune.mlx_engine.optimizer import put
from crosstune.mlx_engine.task import Arrays, MetricSums
from crosstune.mlx_engine.tasks.causal_lm import CausalLoss

Weights = Mapping[str, mx.array]


class TokenLoss(CausalLoss):
    """A loss of the logits of the supervised tokens; a subclass defines `sums`."""

    def sums(self, arrays: Arrays, weights: Weights) -> tuple[mx.array, MetricSums]:
        """Return the loss, summed over a batch, and the sums of its metrics. `weights`: the trained weights in the model."""
        raise NotImplementedError

    def __call__(self, arrays: Arrays) -> tuple[mx.array, MetricSums]:
        return self.sums(arrays, self.trained_weights())

    def scaled(self, arrays: Arrays, weights: Weights, scale: mx.array) -> tuple[mx.array, MetricSums]:
        total, metrics = self.sums(arrays, weights)
        return total * scale, metrics

    def trained_weights(self) -> dict[str, mx.array]:
        return {
            canonical_name(name): array for name, array in tree_flatten(self.model.trainable_parameters())
        }

    @contextlib.contextmanager
    def other_weights(self, other: Weights, weights: Weights) -> Iterator[None]:
        """Run the model with other trained weights, without dropout, in the `with` block; then put `weights` back."""
        was_training = self.model.training
        put(self.model, other)
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(was_training)
            put(self.model, weights)

    def measure(
        self,
        hidden: mx.array,
        weights: Weights,
        measure: Callable[[mx.array, slice], tuple[mx.array, mx.array]],
    ) -> tuple[mx.array, mx.array]:
        """Return two values for each supervised token, the second without a gradient: `measure` of its fp32 logits.

        `hidden`: the hidden states, or the logits of a model that cannot be split before its head.
        """
        split, head = self._split, {name: weights[name] for name in self._head_weights}

        def run(chunk: slice) -> Callable[..., tuple[mx.array, mx.array]]:
            def measured(hidden: mx.array, head: dict[str, mx.array]) -> tuple[mx.array, mx.array]:
                put(self.model, head)
                logits = split.logits(hidden) if split is not None else hidden
                return measure(logits.astype(mx.float32), chunk)

            return measured

        found, others = list[mx.array](), list[mx.array]()
        for chunk in self._chunks(hidden if split is not None else None):
            # Recomputed in the backward pass, so that only one chunk of logits is in memory.
            part = mx.depends(hidden[chunk], found[-1:]) if found else hidden[chunk]
            values = mx.checkpoint(run(chunk))(part, head)
            found.append(values[0])
            others.append(mx.stop_gradient(values[1]))
        put(self.model, head)
        return mx.concatenate(found), mx.concatenate(others)
