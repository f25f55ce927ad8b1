"""Replace transformers' recurrences in plain torch with the chunked ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from crosstune.torch_engine.kernels.delta_rule import chunk_gated_delta_rule
from crosstune.torch_engine.kernels.state_space import chunk_scan

_OURS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "mamba2_chunk_scan": chunk_scan,
}
"""By the names of transformers' functions. They run kernels where flash-linear-attention or mamba-ssm are installed, and are
then kept."""
_LAYERS_OWN = "chunk_gated_delta_rule"
"""The attribute of layers in versions of transformers that call a function through the layer."""


def use_chunked_scans(model: nn.Module) -> None:
    """Make the layers that call transformers' functions in plain torch call ours."""
    for module in model.modules():
        ours = _OURS.get(getattr(getattr(module, _LAYERS_OWN, None), "__name__", ""))
        if ours is not None:
            setattr(module, _LAYERS_OWN, ours)
            continue
        forward = inspect.unwrap(type(module).forward)
        names = getattr(getattr(forward, "__code__", None), "co_names", ())
        for name in _OURS.keys() & set(names):
            theirs = inspect.getclosurevars(forward.__globals__[name]).nonlocals
            if not theirs.get("is_new_implementation", False):
                module.forward = MethodType(_with_global(forward, name, _OURS[name]), module)


def _with_global(function: Any, name: str, value: Any) -> FunctionType:
    """Return a function that reads another value of one global name. The module of the function is not changed."""
    found = FunctionType(
        function.__code__,
        {**function.__globals__, name: value},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    found.__kwdefaults__ = function.__kwdefaults__
    return found
