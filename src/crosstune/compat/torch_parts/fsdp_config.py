"""Define MPSFSDPConfig, whose settings are checked when it is made and when one is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

from crosstune.core.errors import UserError, raise_all, shown
from crosstune.core.names import unknown_name

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
        problems = []
        for entry in fields(self):
            try:
                object.__setattr__(self, entry.name, _read(entry.name, getattr(self, entry.name)))
            except UserError as error:
                problems.append(error)
        if not problems and self.rank >= self.world_size:
            why = f"world_size={self.world_size} counts from 0."
            problems.append(UserError(f"rank={self.rank} does not exist.", why=why))
        raise_all(problems)
        object.__setattr__(self, "_is_made", True)

    def __setattr__(self, name: str, value: Any) -> None:
        """Check a setting that is changed later; an unknown name is an error, not a new attribute."""
        if not hasattr(self, "_is_made"):
            object.__setattr__(self, name, value)
            return
        names = [entry.name for entry in fields(self)]
        if name not in names:
            raise unknown_name("setting of MPSFSDPConfig", name, names)
        object.__setattr__(self, name, _read(name, value))


def _read(name: str, value: Any) -> Any:
    """Return a setting in the type that the code uses; raise UserError for an invalid value."""
    read, why, do = _SETTINGS.get(name, (_one_of({}, True, False), "", "use True or False"))
    try:
        return read(value)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{name}={shown(value)} cannot be used.", why=why, do=do) from error


def _one_of(names: Mapping[str, Any], *others: Any) -> Callable[[Any], Any]:
    """Return a reader of some values, given by name or themselves."""

    def read(value: Any) -> Any:
        if isinstance(value, str):
            return names[value.strip().upper().removeprefix("TORCH.")]
        allowed = [*names.values(), *others]
        return allowed[allowed.index(value)]

    return read


def _text(value: Any) -> str:
    if "://" not in value:
        raise ValueError
    return str(value)


def _operators(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise ValueError
    return tuple(value)


def _count(least: int, *others: Any) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if value in others:
            return value
        if isinstance(value, bool) or value != int(value) or value < least:
            raise ValueError
        return int(value)

    return read


_SETTINGS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "sharding_strategy": (
        _one_of({member.name: member for member in _STRATEGIES}),
        "a Mac has one GPU, so hybrid sharding within a machine would leave the model whole.",
        "use FULL_SHARD, SHARD_GRAD_OP or NO_SHARD, as a name or a member of ShardingStrategy",
    ),
    "backward_prefetch": (
        _one_of({member.name: member for member in BackwardPrefetch}, None),
        "",
        "use BACKWARD_PRE, BACKWARD_POST or None",
    ),
    **dict.fromkeys(
        ("compute_dtype", "reduce_dtype", "buffer_dtype"),
        (_one_of(_DTYPES), "", "use torch.float16, torch.bfloat16 or torch.float32"),
    ),
    "backend": (
        _one_of({"GLOO": "gloo"}),
        "MPS has no collective library: NCCL needs NVIDIA GPUs. Collectives go through host memory and gloo.",
        "use backend='gloo'; on NVIDIA GPUs train with: crosstune train --world_size N",
    ),
    "init_method": (_text, "", "use env://, tcp://HOST:PORT or file:///PATH"),
    **dict.fromkeys(("min_num_params", "world_size"), (_count(1), "", "use an integer from 1")),
    "rank": (_count(0), "", "use an integer from 0"),
    "unified_memory_pool_size": (_count(1, None), "", "use an integer from 1, or None"),
    "fallback_to_cpu_ops": (_operators, "", "use a list of names such as ['aten::sort']"),
}
"""Setting -> (reader, reason to reject other values, advice); all others are flags."""
