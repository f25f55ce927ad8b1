"""Control the parameters that FSDP2 has gathered. Works on a model that is not sharded too, and then does nothing.

FSDP2's classes are recognized by their methods: importing them takes long, and a single process does not need them.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn


def sharded_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(type(module), "set_requires_gradient_sync")]


def free_gathered(model: nn.Module) -> None:
    """Free the gathered parameters of all modules. The next pass gathers them again, with their present values."""
    for module in sharded_modules(model):
        module.reshard()


def set_gradient_sync(model: nn.Module, reduces: bool) -> None:
    """Choose whether the next backward pass reduces gradients over the ranks or keeps them for a later one."""
    for module in sharded_modules(model)[:1]:  # the root, which tells the others
        module.set_requires_gradient_sync(reduces)


def without_gradients(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Turn autograd off. FSDP2 keeps the tensors that it gathers into, so they must not be made in inference mode."""
    return torch.no_grad() if sharded_modules(model) else torch.inference_mode()
