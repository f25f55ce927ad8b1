"""The loss of causal language models: a sum over supervised tokens and never a mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from crosstune.core.errors import UserError
from crosstune.core.protocols import IGNORED, Batch
from crosstune.mlx_engine.calls import wrap_call
from crosstune.mlx_engine.documents import document_caches

SMALLEST_MULTIPLE = 32
_TRIAL = (AttributeError, TypeError, ValueError, IndexError, KeyError)
"""What a model raises that was not written for a cache of our own."""
_ROUNDING = {mx.float32: 1e-3, mx.float16: 2e-2, mx.bfloat16: 1e-1}
"""How far two ways to compute the same logits may be apart, relative to the largest."""


@dataclass(frozen=True, kw_only=True)
class Feed:
    """A batch on the device. `places` are the supervised positions of all its rows, counted through them."""

    input_ids: mx.array
    places: mx.array
    targets: mx.array
    counted: mx.array
    """1 for a place that carries loss, 0 for one that only fills up to a common size."""
    segments: mx.array | None

    def arrays(self) -> list[mx.array]:
        packed = [self.segments] if self.segments is not None else []
        return [self.input_ids, self.places, self.targets, self.counted, *packed]

    @classmethod
    def of(cls, arrays: list[mx.array]) -> Feed:
        return cls(
            input_ids=arrays[0],
            places=arrays[1],
            targets=arrays[2],
            counted=arrays[3],
            segments=arrays[4] if len(arrays) > 4 else None,
        )


def make_feed(batch: Batch, *, few_shapes: bool = False) -> Feed:
    """`few_shapes` rounds sizes up, as a compiled step is made anew for each. What is added carries no loss, and lies
    behind everything that does."""
    length = batch.input_ids.shape[1]
    width = _round_up(length) if few_shapes else length
    pad = ((0, 0), (0, width - length))
    row, column = (batch.targets != IGNORED).nonzero()
    num_places = max(1, _round_up(len(row)) if few_shapes else len(row))
    places = np.zeros(num_places, dtype=np.int32)
    targets = np.zeros(num_places, dtype=np.int32)
    places[: len(row)] = row * width + column
    targets[: len(row)] = batch.targets[row, column]
    packed = batch.segments.max() > 1
    return Feed(
        input_ids=mx.array(np.pad(batch.input_ids, pad)),
        places=mx.array(places),
        targets=mx.array(targets),
        counted=mx.array((np.arange(num_places) < len(row)).astype(np.float32)),
        segments=mx.array(np.pad(batch.segments, pad)) if packed else None,
    )


class CausalLoss:
    """Cross entropy in fp32, summed over the supervised tokens of a batch.

    Rows are padded on the right and attention is causal, so no token sees padding and no mask is needed. Only
    supervised positions reach the head, in every model where the last hidden states can be had; elsewhere all do.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._places: mx.array | None = None
        self._selects = _find_body(model)
        self._separates = False
        if self._selects is not None:
            wrap_call(self._selects, self._select)

    def __call__(self, feed: Feed) -> mx.array:
        caches = None
        if feed.segments is not None:
            caches = document_caches(self.model, feed.segments)
        self._places = feed.places if self._selects is not None else None
        try:
            logits = self.model(feed.input_ids, cache=caches) if caches else self.model(feed.input_ids)
        finally:
            self._places = None
        if self._selects is None:
            logits = logits.reshape(-1, logits.shape[-1])[feed.places]
        return _cross_entropy(logits.reshape(-1, logits.shape[-1]), feed.targets, feed.counted)

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
        except _TRIAL as error:
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

    def _select(self, call: Callable[..., Any], body: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = call(*args, **kwargs)
        if self._places is None:
            return hidden
        return hidden.reshape(1, -1, hidden.shape[-1])[:, self._places]


def _cross_entropy(logits: mx.array, targets: mx.array, counted: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    picked = mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return ((mx.logsumexp(logits, axis=-1) - picked) * counted).sum()


def _find_body(model: Any) -> nn.Module | None:
    """The part of a model that ends in its last hidden states: the one that holds its layers. None where a trial
    shows that what follows is more than a head for each position."""
    bodies = [m for name, m in model.named_modules() if name and m.get("layers") is model.layers]
    if len(bodies) != 1:
        return None
    body, ids = bodies[0], mx.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    places = mx.array([1, 6])

    def select(call: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = call(*args, **kwargs)
        return hidden.reshape(1, -1, hidden.shape[-1])[:, places]

    expected = model(ids).reshape(8, -1)[places]
    undo = wrap_call(body, select)
    try:
        found = model(ids)
        same = found.shape == (1, *expected.shape) and bool(
            mx.allclose(found[0].astype(mx.float32), expected.astype(mx.float32), rtol=1e-2, atol=1e-3)
        )
    except _TRIAL:
        same = False
    finally:
        undo()
    return body if same else None


def _round_up(number: int) -> int:
    """To the next of eight sizes between two powers of two: an eighth is added at most."""
    multiple = max(SMALLEST_MULTIPLE, 1 << max(0, (number - 1).bit_length() - 4))
    return -(-number // multiple) * multiple
