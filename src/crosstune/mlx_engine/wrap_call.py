"""Wrap the calls of single modules, to recompute them in the backward pass or to find non-finite outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

Around = Callable[..., Any]
"""Called with the original call, the module, and the arguments of the call."""


def wrap_call(module: nn.Module, around: Around) -> Callable[[], None]:
    """Wrap the call of one module, through a subclass, and return a function that undoes it."""
    kind = type(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(lambda *a, **k: kind.__call__(self, *a, **k), self, *args, **kwargs)

    object.__setattr__(module, "__class__", type(kind.__name__, (kind,), {"__call__": call}))
    return lambda: object.__setattr__(module, "__class__", kind)


def recompute_in_backward(layer: nn.Module, *, random: bool = False) -> None:
    """Turn on gradient checkpointing: the backward pass recomputes the layer's activations.

    `random`: the layer draws from MLX's global generator, and must draw the same again. Not for a compiled step.
    """
    wrap_call(layer, _checkpointed_random if random else _checkpointed)


def _checkpointed_random(call: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Seed the generator identically for both calls of the layer, and with a new seed for the layers after it."""
    drawn: Any = mx.random.randint(0, 2**31 - 1, (2,)).tolist()
    seed, following = drawn

    def seeded_call(*arguments: Any, **named: Any) -> Any:
        mx.random.seed(seed)
        try:
            return call(*arguments, **named)
        finally:
            mx.random.seed(following)

    return _checkpointed(seeded_call, layer, *args, **kwargs)


def _checkpointed(call: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the layer through mx.checkpoint, with the arrays of its arguments as inputs: only inputs get gradients."""
    arguments = [list(args), kwargs]
    arrays: list[mx.array] = []
    tree_map(lambda value: arrays.append(value) if isinstance(value, mx.array) else None, arguments)

    def inner(params: Any, inputs: list[Any]) -> Any:
        layer.update(params)
        remaining = iter(inputs)
        positional, named = tree_map(
            lambda value: next(remaining) if isinstance(value, mx.array) else value, arguments
        )
        return call(*positional, **named)

    return mx.checkpoint(inner)(layer.trainable_parameters(), arrays)


@contextmanager
def watch_outputs(model: nn.Module) -> Iterator[list[str]]:
    """Collect the names of layers whose output is not finite, in the order of the forward pass, innermost first."""
    bad: list[str] = []

    def watch(name: str) -> Callable[..., Any]:
        def check(call: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
            output = call(*args, **kwargs)
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            checked = isinstance(first, mx.array) and mx.issubdtype(first.dtype, mx.floating)
            if checked and not bool(mx.isfinite(first).all()):
                bad.append(name)
            return output

        return check

    undo = [
        wrap_call(module, watch(name)) for name, module in model.named_modules() if name and callable(module)
    ]
    try:
        yield bad
    finally:
        for restore in undo:
            restore()


def bad_arrays(arrays: Mapping[str, mx.array]) -> list[str]:
    return [name for name, array in arrays.items() if not bool(mx.isfinite(array).all())]
