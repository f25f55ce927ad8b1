"""A model cut at its last hidden states, so that its logits, which are large, need not all be there at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from crosstune.mlx_engine.adapters import canonical_name
from crosstune.mlx_engine.masters import put
from crosstune.mlx_engine.wrap_call import wrap_call

TRIAL_ERRORS = (AttributeError, TypeError, ValueError, IndexError, KeyError)
"""What a model raises that was not written for what we try with it."""


class SplitHead:
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


def cut(model: Any) -> SplitHead | None:
    """The body is the part that holds the layers. None where a trial shows that what follows it is more than a head
    for each position."""
    bodies = [module for name, module in model.named_modules() if name and _holds_layers(module, model)]
    if len(bodies) != 1:
        return None
    ids = mx.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    expected = model(ids)
    expected = expected.reshape(-1, expected.shape[-1]).astype(mx.float32)
    halves = SplitHead(model, bodies[0])
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


def _holds_layers(module: Any, model: Any) -> bool:
    own = module.get("layers", module.get("h"))
    return isinstance(own, list) and bool(own) and own[-1] is model.layers[-1]


def weights_of_the_rest(halves: SplitHead) -> list[str]:
    """Canonical names of the trained weights behind the cut: those that make its logits nonsense when they are."""
    model = halves.model
    found = {canonical_name(name): array for name, array in tree_flatten(model.trainable_parameters())}
    hidden = halves.hidden(mx.array([[1, 2]]))
    mx.eval(hidden)

    def reach(names: list[str]) -> bool:
        put(
            model,
            {name: mx.broadcast_to(mx.array(mx.nan, found[name].dtype), found[name].shape) for name in names},
        )
        try:
            return bool(mx.isnan(halves.logits(hidden)).any())
        finally:
            put(model, {name: found[name] for name in names})

    def search(names: list[str]) -> list[str]:
        """By halves, as most of them reach nothing."""
        if not names or not reach(names):
            return []
        middle = len(names) // 2
        return search(names[:middle]) + search(names[middle:]) if middle else names

    return search(list(found))
