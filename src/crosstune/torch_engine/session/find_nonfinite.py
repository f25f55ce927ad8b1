"""Find the layers, weights and gradients of a model that are not finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn


@contextmanager
def watch_outputs(model: nn.Module) -> Iterator[list[str]]:
    """Collect the names of layers whose output is not finite, in the order of the forward pass, innermost first."""
    bad: list[str] = []

    def check(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        checked = isinstance(first, torch.Tensor) and first.is_floating_point()
        if checked and not bool(torch.isfinite(first).all()):
            bad.append(name)

    modules = [(name, module) for name, module in model.named_modules() if name]
    hooks = [module.register_forward_hook(partial(check, name)) for name, module in modules]
    try:
        yield bad
    finally:
        for hook in hooks:
            hook.remove()


def bad_weights(masters: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in masters.items() if not bool(torch.isfinite(tensor).all())]


def bad_gradients(masters: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the weights with a non-finite gradient, in the order of the backward pass."""
    return [
        name
        for name, tensor in reversed(list(masters.items()))
        if tensor.grad is not None and not bool(torch.isfinite(tensor.grad).all())
    ]
