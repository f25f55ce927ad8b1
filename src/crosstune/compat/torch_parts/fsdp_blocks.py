"""Choose the modules of a model that FSDP2 gathers one at a time: by size, by class, or by a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import _Policy, size_based_auto_wrap_policy

from crosstune.core.errors import UserError
from crosstune.torch_engine.sharding.local_shard import find_blocks

Policy = Callable[..., bool]
_WHOLE = (nn.MultiheadAttention,)
"""Modules that read the weights of their children without calling them."""


def choose_blocks(model: nn.Module, *, policy: Any, min_num_params: int) -> list[nn.Module]:
    """Return the modules that a policy selects, inner modules first; without a policy, the large modules.

    A policy is one of torch's for FSDP, a function of the same form, or a collection of classes.
    """
    if isinstance(policy, (type, set, frozenset, list, tuple)):
        return blocks_of_class(model, policy)
    if isinstance(policy, _Policy):
        return _usable(model, policy._run_policy(model, set(), {}))
    if policy is None:
        policy = partial(size_based_auto_wrap_policy, min_num_params=min_num_params)
    elif not callable(policy):
        raise UserError(
            f"auto_wrap_policy cannot be a {type(policy).__name__}.",
            do="pass a policy of torch.distributed.fsdp.wrap, a set of module classes, or None",
        )
    return _usable(model, (module for module, _ in _walk(model, policy, set())))


def blocks_of_class(model: nn.Module, classes: Any) -> list[nn.Module]:
    """Return the modules of these classes, inner modules first; without a class, the model's repeated blocks."""
    repeated = list(find_blocks(model).values())
    if classes is None:
        return repeated
    wanted = tuple(classes) if isinstance(classes, Iterable) else (classes,)
    if not wanted or not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in wanted):
        raise UserError(
            "transformer_layer_cls must be the class of the model's layers.",
            do="pass a subclass of torch.nn.Module, such as nn.TransformerEncoderLayer, or a set of them",
        )
    found = [module for module in model.modules() if isinstance(module, wanted)]
    if not found:
        names = ", ".join(sorted({type(block).__name__ for block in repeated}))
        raise UserError(
            f"The model has no {' or '.join(kind.__name__ for kind in wanted)}.",
            do=f"its repeated layers are: {names}" if names else "use wrap_model, which selects by size",
        )
    return _usable(model, found)


def _walk(module: nn.Module, policy: Policy, seen: set[int]) -> list[tuple[nn.Module, int]]:
    """Return the modules that a policy of FSDP1 selects, each with its number of remaining parameters."""
    if id(module) in seen:
        return []
    seen.add(id(module))
    own = sum(parameter.numel() for parameter in module.parameters())
    found: list[tuple[nn.Module, int]] = []
    if not isinstance(module, _WHOLE) and policy(module=module, recurse=True, nonwrapped_numel=own):
        for child in module.children():
            found += _walk(child, policy, seen)
    left = own - sum(taken for _, taken in found)
    if left and _has_forward(module) and policy(module=module, recurse=False, nonwrapped_numel=left):
        found.append((module, left))
    return found


def _has_forward(module: nn.Module) -> bool:
    """True if a module has a forward() that FSDP can hook; containers such as ModuleList do not."""
    return type(module).forward is not nn.Module.forward


def _usable(model: nn.Module, chosen: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the chosen modules that FSDP2 can gather by themselves, inner modules first."""
    wanted = set(map(id, chosen)) - {id(model)}
    found = [(name.count("."), module) for name, module in model.named_modules() if id(module) in wanted]
    ordered = [module for _, module in sorted(found, key=lambda entry: -entry[0])]
    return [module for module in ordered if _has_forward(module) and not _shares_weights(model, module)]


def _shares_weights(model: nn.Module, module: nn.Module) -> bool:
    """True if another part of the model has a weight of this module, such as a tied head."""
    inside = set(map(id, module.modules()))
    own = set(map(id, module.parameters()))
    return any(
        id(parameter) in own
        for other in model.modules()
        if id(other) not in inside
        for parameter in other.parameters(recurse=False)
    )
