"""Define MPSFSDPConfig, checked when made and when changed, and choose the modules that FSDP2 gathers one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
from torch.distributed.fsdp.wrap import _Policy, size_based_auto_wrap_policy

from crosstune.core.errors import UserError, shown
from crosstune.core.names import unknown_name
from crosstune.torch_engine.sharding.local_shard import find_blocks

_STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
_DTYPES = {
    **dict.fromkeys(("FLOAT16", "FP16", "HALF"), torch.float16),
    **dict.fromkeys(("BFLOAT16", "BF16"), torch.bfloat16),
    **dict.fromkeys(("FLOAT32", "FP32", "FLOAT"), torch.float32),
}


@dataclass
class MPSFSDPConfig:
    """Sharding settings. Strategies are torch enum members or their names."""

    sharding_strategy: ShardingStrategy | str = ShardingStrategy.FULL_SHARD
    min_num_params: int | float = 1_000_000
    """Gather modules of at least this many parameters one at a time."""

    use_mixed_precision: bool = True
    compute_dtype: torch.dtype = torch.float16
    reduce_dtype: torch.dtype = torch.float32
    buffer_dtype: torch.dtype = torch.float16

    cpu_offload: bool = False
    backward_prefetch: BackwardPrefetch | str | None = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: bool = True
    limit_all_gathers: bool = True

    backend: str = "gloo"
    init_method: str = "env://"
    world_size: int = 1
    rank: int = 0

    sync_module_states: bool = True
    """Start every process from the weights of rank 0."""
    use_orig_params: bool = True

    unified_memory_pool_size: int | None = None
    """Maximum bytes that torch may allocate on the device; None keeps torch's own limit."""
    aggressive_memory_optimization: bool = False
    """Release cached memory before each forward pass."""
    fallback_to_cpu_ops: Sequence[str] = ()
    """Operators to run on the CPU if MPS lacks them; a warning unless $PYTORCH_ENABLE_MPS_FALLBACK is 1."""

    debug_mode: bool = False
    profile_memory: bool = False

    def __post_init__(self) -> None:
        if self.rank >= self.world_size:
            why = f"world_size={self.world_size} counts from 0."
            raise UserError(f"rank={self.rank} does not exist.", why=why)

    def __setattr__(self, name: str, value: Any) -> None:
        """Check a setting; an unknown name is an error, not a new attribute."""
        if name not in self.__dataclass_fields__:
            raise unknown_name("setting of MPSFSDPConfig", name, self.__dataclass_fields__)
        object.__setattr__(self, name, _read(name, value))


def _read(name: str, value: Any) -> Any:
    """Return a setting in the type that the code uses; raise UserError for an invalid value."""
    why = ""
    if name in _LEAST:
        if name == "unified_memory_pool_size" and value is None:
            return None
        if isinstance(value, (int, float)) and value >= _LEAST[name] and value % 1 == 0:
            return int(value)
        do = f"use an integer from {_LEAST[name]}"
    elif name in _CHOICES:
        names, why, do = _CHOICES[name]
        if isinstance(value, str) and (key := value.strip().upper().removeprefix("TORCH.")) in names:
            return names[key]
        if value in names.values():
            return value
    else:
        return value
    raise UserError(f"{name}={shown(value)} cannot be used.", why=why, do=do)


_LEAST = {"min_num_params": 1, "world_size": 1, "rank": 0, "unified_memory_pool_size": 1}
_CHOICES: dict[str, tuple[Mapping[str, Any], str, str]] = {
    "sharding_strategy": (
        {member.name: member for member in _STRATEGIES},
        "a Mac has one GPU, so hybrid sharding within a machine would leave the model whole.",
        "use FULL_SHARD, SHARD_GRAD_OP or NO_SHARD, as a name or a member of ShardingStrategy",
    ),
    "backward_prefetch": (
        {"NONE": None, **{member.name: member for member in BackwardPrefetch}},
        "",
        "use BACKWARD_PRE, BACKWARD_POST or None",
    ),
    **dict.fromkeys(
        ("compute_dtype", "reduce_dtype", "buffer_dtype"),
        (_DTYPES, "", "use torch.float16, torch.bfloat16 or torch.float32"),
    ),
    "backend": (
        {"GLOO": "gloo"},
        "MPS has no collective library: NCCL needs NVIDIA GPUs. Collectives go through host memory and gloo.",
        "use backend='gloo'; on NVIDIA GPUs train with: crosstune train --world_size N",
    ),
}
"""Setting -> (values by name, reason to reject others, advice)."""


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
