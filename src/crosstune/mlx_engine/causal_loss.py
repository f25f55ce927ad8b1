"""The loss of causal language models on MLX: a sum over supervised tokens, its logits made in parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from crosstune.core.errors import UserError
from crosstune.mlx_engine.masters import put
from crosstune.mlx_engine.packed_mask import document_caches
from crosstune.mlx_engine.split_head import TRIAL_ERRORS, cut, weights_of_the_rest
from crosstune.mlx_engine.task import Arrays, MetricSums

LOGITS_AT_A_TIME, PLACES_AT_LEAST = 2**24, 512
"""Parts of fewer places would leave a GPU idle."""
_ROUNDING = {mx.float32: 1e-3, mx.float16: 2e-2, mx.bfloat16: 1e-1}
"""How far two ways to compute the same logits may be apart, relative to the largest."""


class CausalLoss:
    """Cross entropy in fp32, summed over the supervised tokens of a batch.

    Rows are padded on the right and attention is causal, so no token sees padding and no mask is needed. Only
    supervised positions reach the head, and only so many at a time, in every model that can be cut before it;
    elsewhere all of them do.
    """

    def __init__(self, model: nn.Module, *, places_at_a_time: int | None = None) -> None:
        self.model = model
        self.places_at_a_time = places_at_a_time
        self._halves = cut(model)
        self._trained = weights_of_the_rest(self._halves) if self._halves is not None else []
        self._separates = False

    def __call__(self, arrays: Arrays) -> tuple[mx.array, MetricSums]:
        if self._halves is None:
            return self._whole(arrays), {}
        return self._by_parts(self._hidden(arrays), {}, arrays, gradients=False)[0], {}

    def scaled(
        self, arrays: Arrays, weights: Mapping[str, mx.array], scale: mx.array
    ) -> tuple[mx.array, MetricSums]:
        """Return the loss times `scale`, to be differentiated by `weights`, which lie in the model.

        A part of the logits is made, used for its share of loss and gradient, and gone before the next: all of them
        are the largest thing of a step. So the gradient of the head is there with the loss, and is only handed back.
        """
        feed = {**arrays, "counted": arrays["counted"] * scale}
        if self._halves is None:
            return self._whole(feed), {}

        @mx.custom_function
        def total(hidden: mx.array, head: dict[str, mx.array]) -> Any:
            return self._by_parts(hidden, head, feed, gradients=True)

        @total.vjp
        def total_vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
            def times(gradient: mx.array) -> mx.array:
                return gradient * cotangents[0].astype(gradient.dtype)

            return times(outputs[1]), {name: times(array) for name, array in outputs[2].items()}

        head = {name: weights[name] for name in self._trained}
        found: Any = total(self._hidden(feed), head)
        return found[0], {}

    def _hidden(self, feed: Arrays) -> mx.array:
        assert self._halves is not None
        return self._halves.hidden(feed["input_ids"], **self._caches(feed))[feed["places"]]

    def _whole(self, feed: Arrays) -> mx.array:
        logits = self.model(feed["input_ids"], **self._caches(feed))
        return _cross_entropy(
            logits.reshape(-1, logits.shape[-1])[feed["places"]], feed["targets"], feed["counted"]
        )

    def _by_parts(
        self, hidden: mx.array, weights: dict[str, mx.array], feed: Arrays, *, gradients: bool
    ) -> tuple[mx.array, mx.array, dict[str, mx.array]]:
        """The loss, and its gradients by hidden states and by the trained weights behind them."""
        halves = self._halves
        assert halves is not None

        def loss_of(by: tuple[mx.array, dict[str, mx.array]], targets: mx.array, counted: mx.array) -> Any:
            put(self.model, by[1])
            return _cross_entropy(halves.logits(by[0]), targets, counted)

        compute: Any = mx.value_and_grad(loss_of) if gradients else loss_of
        most = self.places_at_a_time
        if most is None:
            most = max(LOGITS_AT_A_TIME // halves.logits(hidden[:1]).shape[-1], PLACES_AT_LEAST)
        size = -(-hidden.shape[0] // -(-hidden.shape[0] // most))
        total, by_hidden, by_weight = mx.array(0.0), list[mx.array](), dict[str, mx.array]()
        for start in range(0, hidden.shape[0], size):
            part = slice(start, start + size)
            one = mx.depends(hidden[part], [total, *by_hidden[-1:], *by_weight.values()])
            found = compute((one, weights), feed["targets"][part], feed["counted"][part])
            if gradients:
                found, (slope, slopes) = found
                by_hidden.append(slope)
                for name, array in slopes.items():
                    array = array.astype(mx.float32)
                    by_weight[name] = by_weight[name] + array if name in by_weight else array
            total = total + found
        put(self.model, weights)
        return (
            total,
            mx.concatenate(by_hidden) if by_hidden else mx.zeros_like(hidden),
            {name: array.astype(weights[name].dtype) for name, array in by_weight.items()},
        )

    def _caches(self, feed: Arrays) -> dict[str, Any]:
        if "segments" not in feed:
            return {}
        return {"cache": document_caches(self.model, feed["segments"])}

    def ensure_separates_documents(self) -> None:
        """Raise unless a document in a packed row is what it is alone. Tried once per model: not every kind of model
        takes a mask or counts its positions from each other, and one that does not would train on wrong text."""
        if self._separates:
            return
        # Borders in different places, so that a mask which lands on the wrong row or head shows.
        starts, width = (3, 5, 8, 9, 11), 16
        rows = mx.arange(1, len(starts) * width + 1).reshape(len(starts), width)
        segments = mx.array([[1] * start + [2] * (width - start) for start in starts])
        try:
            logits = self.model(rows, cache=document_caches(self.model, segments))
            alone = [self.model(rows[row : row + 1, start:])[0] for row, start in enumerate(starts)]
            mx.eval(logits, alone)
        except TRIAL_ERRORS as error:
            raise self._cannot_pack(f"mlx-lm's code for it takes no mask of ours ({error}).") from error
        for row, start in enumerate(starts):
            size = float(mx.abs(alone[row]).max())
            if float(mx.abs(logits[row, start:] - alone[row]).max()) > _ROUNDING[logits.dtype] * size:
                raise self._cannot_pack("a document reads otherwise when another one stands before it.")
        self._separates = True

    def _cannot_pack(self, why: str) -> UserError:
        kind = getattr(self.model, "model_type", type(self.model).__name__)
        return UserError(
            f"--packing cannot be used with a {kind} model on MLX.", why=why, do="leave out --packing"
        )


def _cross_entropy(logits: mx.array, targets: mx.array, counted: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    picked = mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return ((mx.logsumexp(logits, axis=-1) - picked) * counted).sum()
