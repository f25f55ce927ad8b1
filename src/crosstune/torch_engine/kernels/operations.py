"""Define the argument types of the fast layers' operations."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from types import ModuleType

import torch

NUM_PARTS = 3
"""Columns of an fp8 matmul for one column of an adapter: each number is a sum of two e4m3 parts, and multiplying two such
sums gives three relevant terms.
"""
LINES_IN_TILE = 32
"""Lines of an adapter that one program of a kernel writes."""


@dataclass(frozen=True)
class Norm:
    """An RMSNorm: x / rms(x) * (weight + offset). Gemma's weights have an offset of 1."""

    weight: torch.Tensor
    eps: float
    offset: float = 0.0


@dataclass(frozen=True)
class Heads:
    """The layout of a row of queries, keys and values."""

    num_queries: int
    num_keys: int
    size: int
    rotary: int
    """The number of leading values of each head that are rotated."""

    @property
    def width(self) -> int:
        return (self.num_queries + 2 * self.num_keys) * self.size


@dataclass(frozen=True)
class Quantize:
    """A request for an e4m3 copy of the rows that a kernel makes. `columns` multiplies them first, for a matmul with a weight
    whose scales belong to these columns. The copy has `room` for more columns on the left."""

    columns: torch.Tensor | None = None
    room: int = 0


@dataclass
class Rows:
    """Activations or gradients with a row per token; for an fp8 matmul also an e4m3 copy, wider by its room on the left, and a
    scale per row."""

    values: torch.Tensor
    packed: torch.Tensor | None = None
    scale: torch.Tensor | None = None


QKNorms = tuple[Norm, Norm] | None
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Operations = ModuleType
"""`torch_operations` or `triton_operations`, with the same functions. Rows may be strided; their last dimension is contiguous."""


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
