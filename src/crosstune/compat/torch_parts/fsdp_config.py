"""The settings of the guides' MPSFSDPWrapper, checked when they are made and when one is changed."""

from __future__ import annotations

from collections.abc import Callable
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
    """Modules with at least so many parameters are gathered one at a time."""

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
    fallback_to_cpu_ops: tuple[str, ...] = ("aten::_fused_adam*", "aten::_foreach_*")
    """Patterns of operators to warn about on MPS if the installed torch has no Metal kernel for them."""

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
    """Return a setting in the type that the code uses; raise UserError if it cannot be meant."""
    if name in _READERS:
        return _READERS[name](name, value)
    if not isinstance(value, bool):
        raise UserError(f"{name}={shown(value)} is not a setting.", do=f"use {name}=True or {name}=False")
    return value


def _read_strategy(name: str, value: Any) -> ShardingStrategy:
    found = _member(ShardingStrategy, value)
    if found in _STRATEGIES:
        return found
    why = (
        "a Mac has one GPU, so sharding within a machine leaves the model whole." if found is not None else ""
    )
    raise UserError(
        f"{name}={shown(value)} cannot be used.",
        why=why,
        do=f"use {', '.join(member.name for member in _STRATEGIES)}, as a name or a member of ShardingStrategy",
    )


def _read_prefetch(name: str, value: Any) -> BackwardPrefetch | None:
    if value is None:
        return None
    found = _member(BackwardPrefetch, value)
    if found is None:
        names = ", ".join(BackwardPrefetch.__members__)
        raise UserError(f"{name}={shown(value)} is unknown.", do=f"use {names} or None")
    return found


def _member(kind: type[Enum], value: Any) -> Any:
    if isinstance(value, str):
        return kind.__members__.get(value.strip().upper())
    return value if isinstance(value, kind) else None


def _read_dtype(name: str, value: Any) -> torch.dtype:
    found = _DTYPES.get(value.strip().removeprefix("torch.").lower()) if isinstance(value, str) else value
    if found not in set(_DTYPES.values()):
        raise UserError(
            f"{name}={shown(value)} cannot be used.", do="use torch.float16, torch.bfloat16 or torch.float32"
        )
    return found


def _read_backend(name: str, value: Any) -> str:
    if isinstance(value, str) and value.strip().lower() == "gloo":
        return "gloo"
    raise UserError(
        f"{name}={shown(value)} cannot be used.",
        why="MPS has no collective library of its own: NCCL needs NVIDIA GPUs. Collectives go through host memory "
        "and gloo.",
        do="use backend='gloo'; on NVIDIA GPUs train with: crosstune train --world_size N",
    )


def _read_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or "://" not in value:
        raise UserError(
            f"{name}={shown(value)} is not an address.", do="use env://, tcp://HOST:PORT or file:///PATH"
        )
    return value


def _read_names(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not all(isinstance(entry, str) for entry in value):
        raise UserError(
            f"{name}={shown(value)} is not a list of operators.", do="use a list such as ['aten::sort']"
        )
    return tuple(value)


def _count(least: int) -> Callable[[str, Any], int]:
    def read(name: str, value: Any) -> int:
        is_whole = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1
        if not is_whole or value < least:
            raise UserError(
                f"{name}={shown(value)} cannot be used.", do=f"use a whole number from {least} on"
            )
        return int(value)

    return read


def _read_pool(name: str, value: Any) -> int | None:
    return None if value is None else _count(1)(name, value)


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "sharding_strategy": _read_strategy,
    "backward_prefetch": _read_prefetch,
    "compute_dtype": _read_dtype,
    "reduce_dtype": _read_dtype,
    "buffer_dtype": _read_dtype,
    "backend": _read_backend,
    "init_method": _read_text,
    "min_num_params": _count(1),
    "world_size": _count(1),
    "rank": _count(0),
    "unified_memory_pool_size": _read_pool,
    "fallback_to_cpu_ops": _read_names,
}
