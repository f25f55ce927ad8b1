"""Choose the implementation of the fast layers' operations for a device."""

from __future__ import annotations

import torch

from crosstune.torch_engine.kernels import torch_operations
from crosstune.torch_engine.kernels.operations import Operations, has_triton


def choose_operations(device: torch.device) -> Operations:
    """Return Triton's kernels on a GPU that has them, plain torch otherwise."""
    if device.type == "cuda" and has_triton():
        from crosstune.torch_engine.kernels import triton_operations

        return triton_operations
    return torch_operations
