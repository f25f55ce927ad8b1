"""Keep the activations that a backward pass needs in host memory instead of on the device."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

SMALLEST_BYTES = 64 * 1024
"""Smaller tensors stay on the device: copying them costs more than their memory."""


def offload_activations(device: torch.device, *, enabled: bool) -> contextlib.AbstractContextManager[Any]:
    """Copy tensors that autograd saves in the block to the host, and back when the backward pass needs them.

    Parameters stay where they are: FSDP2 frees and gathers them itself.
    """
    if not enabled or device.type == "cpu":
        return contextlib.nullcontext()
    pinned = device.type == "cuda"

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not _is_activation(tensor, device):
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        return host.copy_(tensor, non_blocking=pinned)

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device.type == device.type else tensor.to(device, non_blocking=pinned)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _is_activation(tensor: torch.Tensor, device: torch.device) -> bool:
    return (
        tensor.device.type == device.type
        and tensor.is_floating_point()
        and tensor.nbytes >= SMALLEST_BYTES
        and not isinstance(tensor, nn.Parameter)
        and not isinstance(tensor._base, nn.Parameter)
    )
