"""Something put around the call of one module of a model, without touching the others of its class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

Around = Callable[..., Any]
"""Called with the module's own call, the module, and then what the call was given."""


def wrap_call(module: nn.Module, around: Around) -> Callable[[], None]:
    """Python looks a call up in the class, so the module gets a class of its own. Returns how to undo it."""
    kind = type(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(lambda *a, **k: kind.__call__(self, *a, **k), self, *args, **kwargs)

    object.__setattr__(module, "__class__", type(kind.__name__, (kind,), {"__call__": call}))
    return lambda: object.__setattr__(module, "__class__", kind)


def recompute_in_backward(layer: nn.Module) -> None:
    """Gradient checkpointing: the backward pass computes a layer again instead of keeping what it computed."""
    wrap_call(layer, _checkpointed)


def _checkpointed(call: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Every array that comes in, however deep in a tuple, is an input of the recomputation, as gradients reach nothing
    else.

    Caches are neither arrays nor trained, and stay as they are.
    """
    whole = [list(args), kwargs]
    arrays: list[mx.array] = []
    tree_map(lambda value: arrays.append(value) if isinstance(value, mx.array) else None, whole)

    def inner(params: Any, given: list[Any]) -> Any:
        layer.update(params)
        left = iter(given)
        positional, named = tree_map(
            lambda value: next(left) if isinstance(value, mx.array) else value, whole
        )
        return call(*positional, **named)

    return mx.checkpoint(inner)(layer.trainable_parameters(), arrays)
