"""Layers whose weight is read by the part of the model around them, past the layer itself."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

from torch import nn


def reads_weight(model: nn.Module, name: str) -> bool:
    """Whether the module that holds this layer multiplies with its weight itself, as Mamba's mixer does.

    Such a layer can be neither quantized nor given an adapter: what stands in its place would not be asked.
    """
    parent, _, child = name.rpartition(".")
    kind: Any = type(model.get_submodule(parent))
    return f"self.{child}.weight" in _source(kind)


@lru_cache(maxsize=256)
def _source(kind: Any) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # a class that was not read from a file
        return ""
