"""Find the layers and arrays of a model that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from crosstune.mlx_engine.wrap_call import wrap_call


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
