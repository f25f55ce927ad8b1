"""Measure and limit the memory of a device for MPSFSDPWrapper."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch.distributed.fsdp import ShardingStrategy

from crosstune.backends._host import memory_bytes
from crosstune.compat.torch_parts.fsdp_config import MPSFSDPConfig
from crosstune.estimate.memory import GIB
from crosstune.torch_engine.device import clear_cache
from crosstune.torch_engine.probe import allocated_bytes

STATE_SHARE, GATHERED_SHARE = 5 / 8, 15 / 32
"""Largest fractions of memory for an unsharded training state, and for gathered weights."""


@dataclass(kw_only=True)
class MemoryProfile:
    """Memory before and after a context, in bytes."""

    before_bytes: int
    after_bytes: int = 0
    peak_bytes: int | None = None
    """None if the device counts no peak."""

    def __str__(self) -> str:
        peak = "" if self.peak_bytes is None else f", peak {self.peak_bytes / GIB:.3f}"
        return f"memory: {self.before_bytes / GIB:.3f} -> {self.after_bytes / GIB:.3f} GiB{peak}"


class MemoryOptimizer:
    """Chooses a sharding strategy for a model size, and limits torch's allocations."""

    def __init__(self, config: MPSFSDPConfig, device: torch.device) -> None:
        self.config, self.device = config, device

    def optimize_sharding_strategy(self, model_size: float, available_memory: float) -> ShardingStrategy:
        """Return the strategy for fp32 weights of `model_size` bytes, their gradients and two moments."""
        if 4 * model_size < STATE_SHARE * available_memory:
            return ShardingStrategy.NO_SHARD
        is_small = model_size < GATHERED_SHARE * available_memory
        return ShardingStrategy.SHARD_GRAD_OP if is_small else ShardingStrategy.FULL_SHARD

    def setup_memory_pool(self) -> int | None:
        """Limit torch to unified_memory_pool_size and return the limit; None on a CPU."""
        total, limit = device_bytes(self.device), self.config.unified_memory_pool_size
        if self.device.type == "cpu":
            return None  # torch has no pool for host memory
        if limit is None:
            return total
        torch.get_device_module(self.device.type).set_per_process_memory_fraction(limit / total)
        return limit

    def cleanup(self) -> None:
        """Collect garbage and return cached memory to the system."""
        gc.collect()
        clear_cache(self.device)


def device_bytes(device: torch.device) -> int:
    """Return the memory of a device; on MPS the maximum that Metal recommends."""
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    if device.type == "cpu":
        return memory_bytes()[0]
    return int(torch.get_device_module(device.type).mem_get_info()[1])


def used_bytes(device: torch.device) -> tuple[int, int]:
    """Return allocated and reserved bytes; on the CPU both are the memory of the process."""
    if device.type == "cpu":
        resident = int(psutil.Process().memory_info().rss)
        return resident, resident
    return allocated_bytes(device.type)


def memory_stats(device: torch.device) -> dict[str, Any]:
    allocated, reserved = used_bytes(device)
    total = device_bytes(device)
    return {
        "device": device.type,
        "allocated_gb": allocated / GIB,
        "reserved_gb": reserved / GIB,
        "total_gb": total / GIB,
        "free_gb": max(0.0, (total - reserved) / GIB),
        "process_gb": psutil.Process().memory_info().rss / GIB,
    }


@contextmanager
def measure(device: torch.device) -> Iterator[MemoryProfile]:
    module = torch.get_device_module(device.type)
    counts_peak = hasattr(module, "max_memory_allocated")
    if counts_peak:
        module.reset_peak_memory_stats()
    profile = MemoryProfile(before_bytes=used_bytes(device)[0])
    try:
        yield profile
    finally:
        if hasattr(module, "synchronize"):
            module.synchronize()
        profile.after_bytes = used_bytes(device)[0]
        profile.peak_bytes = int(module.max_memory_allocated()) if counts_peak else None
