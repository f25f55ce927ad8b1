"""Add streams, device selection and copy kernels to torch.mps, as FSDP2 expects of a device.

torch uses one Metal queue that runs in order, so a stream only records events. Existing attributes are kept.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

_KERNELS = {
    "all_gather_copy_in": "all_gather_copy_in_cuda",
    "split_with_sizes_copy": "split_with_sizes_copy",
    "chunk_cat": "chunk_cat",
}
"""FSDP2's operators -> torch's implementations for every device."""
_libraries: list[torch.library.Library] = []
"""Keeps the registrations alive: they end with their library."""


def prepare_mps() -> None:
    """Make FSDP2 work with MPS tensors, given a process group that supports them. Idempotent."""
    add_streams(torch.mps)
    register_kernels("MPS")


def add_streams(handle: Any) -> None:
    """Add missing stream and device functions to the module of a device with one queue."""

    class Stream:
        """The one queue of the device."""

        def __init__(self, priority: int = 0) -> None:
            self.priority = priority

        def wait_stream(self, awaited: Any) -> None:
            """Do nothing: work runs in the order of submission."""

        wait_event = wait_stream

        def record_event(self, event: Any = None) -> Any:
            """Return a recorded event, on which the host can wait."""
            recorded = handle.Event() if event is None else event
            recorded.record()
            return recorded

        def synchronize(self) -> None:
            handle.synchronize()

    queue = Stream()
    additions = {
        "Stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(stream),
        "current_stream": lambda device=None: queue,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "is_initialized": lambda: True,
    }
    for name, value in additions.items():
        if not hasattr(handle, name):
            setattr(handle, name, value)


def register_kernels(key: str) -> None:
    """Register FSDP2's operators for a dispatch key that has none."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    for name, function in _KERNELS.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"fsdp::{name}", key):
            library = torch.library.Library("fsdp", "IMPL", key)
            library.impl(name, getattr(collectives, function))
            _libraries.append(library)
