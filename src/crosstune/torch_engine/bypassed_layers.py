"""Find layers whose weight the parent module reads directly, without calling the layer."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

from torch import nn


def reads_weight(model: nn.Module, name: str) -> bool:
    """Return whether the parent of this layer multiplies with its weight itself, as Mamba's mixer does.

    Such a layer can be neither quantized nor adapted: the parent would never call the replacement.
    """
    parent, _, child = name.rpartition(".")
    kind: Any = type(model.get_submodule(parent))
    return f"self.{child}.weight" in _source(kind)


@lru_cache(maxsize=256)
def _source(kind: Any) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # the class has no source file
        return ""
