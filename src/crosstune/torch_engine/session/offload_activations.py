"""Keep the activations that a backward pass needs in host memory instead of on the device."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from typing import Any

import torch
from torch import nn

SMALLEST_BYTES = 64 * 1024
"""Smaller tensors stay on the device."""
NUM_AHEAD = 2
"""Tensors that are copied back before the backward pass needs them."""


def offload_activations(device: torch.device, *, enabled: bool) -> contextlib.AbstractContextManager[Any]:
    """Copy tensors that autograd saves in the `with` block to the host, and back for the backward pass.

    On CUDA both copies run on a separate stream, in parallel with the computation. Parameters are not copied: FSDP2 frees
    and gathers them itself.
    """
    if not enabled or device.type == "cpu":
        return contextlib.nullcontext()
    copies = _AsyncCopies(device) if device.type == "cuda" else None

    def pack(tensor: torch.Tensor) -> Any:
        if not _is_activation(tensor, device):
            return tensor
        return copies.send(tensor) if copies is not None else OnHost(tensor.to("cpu"))

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        return copies.fetch(packed) if copies is not None else packed.host.to(device)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class OnHost:
    """A tensor on the host and, shortly before it is needed, its copy on the device."""

    def __init__(self, host: torch.Tensor, place: int = 0) -> None:
        self.host, self.place = host, place
        self.copy: torch.Tensor | None = None
        self.arrived: torch.cuda.Event | None = None


class _AsyncCopies:
    """Copies to pinned memory on a separate stream. The backward pass needs the tensors in reverse order."""

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device, self.stream = device, _copy_stream(index)
        self._sent: list[weakref.ref[OnHost]] = []

    def send(self, tensor: torch.Tensor) -> OnHost:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.stream)
        sent = OnHost(host, place=len(self._sent))
        self._sent.append(weakref.ref(sent))
        return sent

    def fetch(self, sent: OnHost) -> torch.Tensor:
        """Return a tensor on the device, and start to copy back the tensors that were sent before it."""
        self._start(sent)  # needs no wait: the copy stream allocates the memory
        alive = (one for ref in reversed(self._sent[: sent.place]) if (one := ref()) is not None)
        for before in itertools.islice(alive, NUM_AHEAD):
            self._start(before)
        assert sent.copy is not None and sent.arrived is not None
        current, found = torch.cuda.current_stream(self.device), sent.copy
        current.wait_event(sent.arrived)
        found.record_stream(current)
        sent.copy = sent.arrived = None
        return found

    def _start(self, sent: OnHost) -> None:
        if sent.copy is not None:
            return
        with torch.cuda.stream(self.stream):
            sent.copy = sent.host.to(self.device, non_blocking=True)
            sent.arrived = self.stream.record_event()


@functools.cache
def _copy_stream(index: int) -> torch.cuda.Stream:
    """Return the copy stream of a GPU: one for all passes, since freed memory stays with its stream."""
    return torch.cuda.Stream(index)


def _is_activation(tensor: torch.Tensor, device: torch.device) -> bool:
    return (
        tensor.device.type == device.type
        and tensor.is_floating_point()
        and tensor.nbytes >= SMALLEST_BYTES
        and not isinstance(tensor, nn.Parameter)
        and not isinstance(tensor._base, nn.Parameter)
    )
