"""Cast once what a pass over each new token would cast again: adapters and, under autocast, the head."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from crosstune.torch_engine.adapters import AdaptedLinear
from crosstune.torch_engine.precision import Precision


@contextlib.contextmanager
def cast_once(model: nn.Module, precision: Precision) -> Iterator[None]:
    """Hold the adapters, and a head that autocast would cast, in the dtype of the products inside the block. No weight may
    change there. The values are those that each pass would make."""
    dtype = precision.autocast or precision.weights
    adapters = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    head = _head_to_cast(model, precision)
    full = head.weight if head is not None else None
    try:
        with torch.no_grad(), torch.autocast(_device_type(model), enabled=False):
            for adapter in adapters:
                adapter.held = adapter.factors(dtype)
            if head is not None:
                head.weight = nn.Parameter(head.weight.to(dtype), requires_grad=False)
        yield
    finally:
        for adapter in adapters:
            adapter.held = None
        if head is not None and full is not None:
            head.weight = full


def _head_to_cast(model: nn.Module, precision: Precision) -> nn.Linear | None:
    """Return the output head if autocast casts its frozen weight in each pass, as one that is the embedding's too."""
    find = getattr(model, "get_output_embeddings", None)
    head: Any = find() if find is not None else None
    if precision.autocast is None or type(head) is not nn.Linear:
        return None
    is_cast = not head.weight.requires_grad and head.weight.dtype != precision.autocast
    return head if is_cast else None


def _device_type(model: nn.Module) -> str:
    return next(model.parameters()).device.type
