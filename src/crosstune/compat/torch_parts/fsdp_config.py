"""Define MPSFSDPConfig, whose settings are checked when it is made and when one is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import torch
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

from crosstune.core.errors import ConfigError, UserError, shown
from crosstune.core.names import unknown_name

_STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
_DTYPES = {
    name: dtype
    for dtype, names in {
        torch.float16: ("float16", "fp16", "half"),
        torch.bfloat16: ("bfloat16", "bf16"),
        torch.float32: ("float32", "fp32", "float"),
    }.items()
    for name in names
}


@dataclass
class MPSFSDPConfig:
    """The settings of sharding. Strategies may be given as torch's enums or by name."""

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
    """The most that torch may allocate on the device, in bytes; None leaves torch's own limit."""
    aggressive_memory_optimization: bool = False
    """Give cached memory back before each forward pass."""
    fallback_to_cpu_ops: Sequence[str] = ()
    """Operators to run on the CPU if MPS lacks them. torch falls back for all operators or none, as
    PYTORCH_ENABLE_MPS_FALLBACK says; names given here raise a warning if that variable is not 1."""

    debug_mode: bool = False
    profile_memory: bool = False

    def __post_init__(self) -> None:
        problems = []
        for entry in fields(self):
            try:
                object.__setattr__(self, entry.name, _read(entry.name, getattr(self, entry.name)))
            except UserError as error:
                problems.append(error)
        if not problems and self.rank >= self.world_size:
            problems.append(
                UserError(
                    f"rank={self.rank} does not exist.", why=f"world_size={self.world_size} counts from 0."
                )
            )
        if problems:
            raise ConfigError(problems) if len(problems) > 1 else problems[0]
        object.__setattr__(self, "_is_made", True)

    def __setattr__(self, name: str, value: Any) -> None:
        """Check a setting that is changed later; a name that does not exist is an error, not a new attribute."""
        if not hasattr(self, "_is_made"):
            object.__setattr__(self, name, value)
            return
        names = [entry.name for entry in fields(self)]
        if name not in names:
            raise unknown_name("setting of MPSFSDPConfig", name, names)
        object.__setattr__(self, name, _read(name, value))


def _read(name: str, value: Any) -> Any:
    """Return a setting in the type that the code uses; raise UserError for an impossible value."""
    read, why, do = _SETTINGS.get(name, (_flag, "", "use True or False"))
    try:
        return read(value)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{name}={shown(value)} cannot be used.", why=why, do=do) from error


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _member(kind: type[Enum], allowed: Sequence[Any]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        found = kind[value.strip().upper()] if isinstance(value, str) else value
        return allowed[allowed.index(found)]

    return read


def _dtype(value: Any) -> torch.dtype:
    found = _DTYPES.get(value.strip().removeprefix("torch.").lower()) if isinstance(value, str) else value
    if found not in _DTYPES.values():
        raise ValueError
    return found


def _gloo(value: Any) -> str:
    if value.strip().lower() != "gloo":
        raise ValueError
    return "gloo"


def _address(value: Any) -> str:
    if "://" not in value:
        raise ValueError
    return str(value)


def _operators(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise ValueError
    return tuple(value)


def _count(least: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if isinstance(value, bool) or value != int(value) or value < least:
            raise ValueError
        return int(value)

    return read


_FROM_0, _FROM_1 = "use a whole number from 0 on", "use a whole number from 1 on"
_FLOATS = "use torch.float16, torch.bfloat16 or torch.float32"
_SETTINGS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "sharding_strategy": (
        _member(ShardingStrategy, _STRATEGIES),
        "a Mac has one GPU, so hybrid sharding within a machine would leave the model whole.",
        "use FULL_SHARD, SHARD_GRAD_OP or NO_SHARD, as a name or a member of ShardingStrategy",
    ),
    "backward_prefetch": (
        _member(BackwardPrefetch, (*BackwardPrefetch, None)),
        "",
        "use BACKWARD_PRE, BACKWARD_POST or None",
    ),
    "compute_dtype": (_dtype, "", _FLOATS),
    "reduce_dtype": (_dtype, "", _FLOATS),
    "buffer_dtype": (_dtype, "", _FLOATS),
    "backend": (
        _gloo,
        "MPS has no collective library: NCCL needs NVIDIA GPUs. Collectives go through host memory and gloo.",
        "use backend='gloo'; on NVIDIA GPUs train with: crosstune train --world_size N",
    ),
    "init_method": (_address, "", "use env://, tcp://HOST:PORT or file:///PATH"),
    "min_num_params": (_count(1), "", _FROM_1),
    "world_size": (_count(1), "", _FROM_1),
    "rank": (_count(0), "", _FROM_0),
    "unified_memory_pool_size": (
        lambda value: None if value is None else _count(1)(value),
        "",
        f"{_FROM_1}, or None",
    ),
    "fallback_to_cpu_ops": (_operators, "", "use a list of names such as ['aten::sort']"),
}
"""Setting -> (its reader, why other values are refused, what to use); the others are flags."""
