"""Split a model at its last hidden states, so that logits can be computed in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from crosstune.mlx_engine.adapters import canonical_name, is_head
from crosstune.mlx_engine.wrap_call import wrap_call

TRIAL_ERRORS = (AttributeError, TypeError, ValueError, IndexError, KeyError)
"""Exceptions of a model that does not support a trial call."""


class SplitHead:
    """A model split into a body, which computes hidden states, and a head, which turns each of them into logits.

    Models of mlx-lm are a single call, so the body's call is wrapped: it captures its hidden states, or returns given
    states. MLX is lazy, so the unused part is never computed.
    """

    def __init__(self, model: Any, body_name: str, body: nn.Module) -> None:
        self.model, self.body_name = model, body_name
        self._captured: list[mx.array] | None = None
        self._injected: mx.array | None = None
        self.undo = wrap_call(body, self._cross)

    def hidden(self, ids: mx.array, **kwargs: Any) -> mx.array:
        """Return the hidden states of all positions, row after row."""
        self._captured = []
        try:
            self.model(ids, **kwargs)
            [hidden] = self._captured
        finally:
            self._captured = None
        return hidden.reshape(-1, hidden.shape[-1])

    def logits(self, hidden: mx.array) -> mx.array:
        self._injected = hidden[None]
        try:
            return self.model(mx.zeros(hidden[None].shape[:2], dtype=mx.int32))[0]
        finally:
            self._injected = None

    def _cross(self, call: Callable[..., Any], body: Any, *args: Any, **kwargs: Any) -> Any:
        if self._injected is not None:
            return self._injected
        hidden = call(*args, **kwargs)
        if self._captured is not None:
            self._captured.append(hidden)
            return hidden[:, :1]
        return hidden


def split_model(model: Any) -> SplitHead | None:
    """Split a model after the module that contains its layers; return None if a trial shows that the part after it mixes
    positions."""
    bodies = [(name, body) for name, body in model.named_modules() if name and _holds_layers(body, model)]
    if len(bodies) != 1:
        return None
    ids = mx.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    expected = model(ids)
    expected = expected.reshape(-1, expected.shape[-1]).astype(mx.float32)
    split = SplitHead(model, *bodies[0])
    places = mx.array([1, 6])
    try:
        found = split.logits(split.hidden(ids)[places]).astype(mx.float32)
        same = found.shape == (2, expected.shape[-1])
        if same and bool(mx.allclose(found, expected[places], rtol=1e-2, atol=1e-3)):
            return split
    except TRIAL_ERRORS:
        pass
    split.undo()
    return None


def _holds_layers(module: Any, model: Any) -> bool:
    layers = module.get("layers", module.get("h"))
    return isinstance(layers, list) and bool(layers) and layers[-1] is model.layers[-1]


def find_head_weights(split: SplitHead) -> list[str]:
    """Return the canonical names of the trained weights that the head may use: all outside of the body, and the embeddings of a
    model without a head of its own."""
    modules = dict(split.model.named_modules())
    shares = not any(is_head(name) for name in modules)
    names = (canonical_name(path) for path, _ in tree_flatten(split.model.trainable_parameters()))
    return [
        name
        for name in names
        if not name.startswith(f"{split.body_name}.")
        or (shares and isinstance(modules.get(name.removesuffix(".weight")), nn.Embedding))
    ]
