"""A model cut at its last hidden states, so that its logits, which are large, need not all be there at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from crosstune.mlx_engine.adapters import canonical_name
from crosstune.mlx_engine.calls import wrap_call
from crosstune.mlx_engine.masters import put

TRIAL_ERRORS = (AttributeError, TypeError, ValueError, IndexError, KeyError)
"""What a model raises that was not written for what we try with it."""


class Halves:
    """The body makes hidden states; the rest turns each of them, alone, into logits.

    Models of mlx-lm are one call, so the cut is made from outside: the body hands out what it computed, or is passed
    over and hands on what it is given. What nobody asks for MLX does not compute.
    """

    def __init__(self, model: Any, body: nn.Module) -> None:
        self.model = model
        self._taken: list[mx.array] | None = None
        self._given: mx.array | None = None
        self.undo = wrap_call(body, self._cross)

    def hidden(self, ids: mx.array, **kwargs: Any) -> mx.array:
        """Of every position, one row after the other."""
        self._taken = []
        try:
            self.model(ids, **kwargs)
            [hidden] = self._taken
        finally:
            self._taken = None
        return hidden.reshape(-1, hidden.shape[-1])

    def logits(self, hidden: mx.array) -> mx.array:
        self._given = hidden[None]
        try:
            return self.model(mx.zeros(hidden[None].shape[:2], dtype=mx.int32))[0]
        finally:
            self._given = None

    def _cross(self, call: Callable[..., Any], body: Any, *args: Any, **kwargs: Any) -> Any:
        if self._given is not None:
            return self._given
        hidden = call(*args, **kwargs)
        if self._taken is not None:
            self._taken.append(hidden)
            return hidden[:, :1]
        return hidden


def cut(model: Any) -> Halves | None:
    """The body is the part that holds the layers. None where a trial shows that what follows it is more than a head
    for each position."""
    bodies = [m for name, m in model.named_modules() if name and m.get("layers") is model.layers]
    if len(bodies) != 1:
        return None
    ids = mx.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    expected = model(ids)
    expected = expected.reshape(-1, expected.shape[-1]).astype(mx.float32)
    halves = Halves(model, bodies[0])
    places = mx.array([1, 6])
    try:
        found = halves.logits(halves.hidden(ids)[places]).astype(mx.float32)
        same = found.shape == (2, expected.shape[-1])
        if same and bool(mx.allclose(found, expected[places], rtol=1e-2, atol=1e-3)):
            return halves
    except TRIAL_ERRORS:
        pass
    halves.undo()
    return None


def weights_of_the_rest(halves: Halves) -> list[str]:
    """Canonical names of the trained weights behind the cut: those that a gradient from there reaches."""
    found = {canonical_name(name): array for name, array in tree_flatten(halves.model.trainable_parameters())}
    hidden = halves.hidden(mx.array([[1, 2]]))

    def rest(weights: dict[str, mx.array]) -> mx.array:
        put(halves.model, weights)
        return mx.square(halves.logits(hidden).astype(mx.float32)).sum()

    try:
        gradients = mx.grad(rest)(found) if found else {}
    finally:
        put(halves.model, found)
    # One at a time: each is as large as its weight.
    return [name for name in list(gradients) if bool(mx.any(gradients.pop(name) != 0))]
