"""Define the operations of the fast layers, and the types of their arguments."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Protocol

import torch

E4M3_MAX = 448.0
NUM_PARTS = 3
"""Columns of an fp8 matmul for one column of an adapter: each number is a sum of two e4m3 parts, and three terms of the
product of two such sums matter."""
LINES_IN_TILE = 32
"""Lines of an adapter that one program of a kernel writes."""
SMALLEST_AMAX = 1e-12
"""The smallest largest value of a row: keeps the scale of a row of zeros above zero."""


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


class Operations(Protocol):
    """An implementation of the operations. Rows may be strided; their last dimension is contiguous."""

    def rms_norm(
        self,
        x: torch.Tensor,
        added: torch.Tensor | None,
        norm: Norm,
        out: torch.Tensor,
        quantize: Quantize | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, Rows]:
        """Return x + added, 1 / rms of each row, and the normalized rows in `out`."""
        ...

    def rms_norm_again(
        self, total: torch.Tensor, rstd: torch.Tensor, norm: Norm, out: torch.Tensor
    ) -> torch.Tensor:
        """Rebuild the normalized rows in `out`."""
        ...

    def rms_norm_backward(
        self,
        gradient: torch.Tensor,
        total: torch.Tensor,
        rstd: torch.Tensor,
        norm: Norm,
        residual: torch.Tensor | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Write the gradient of the norm's input, plus `residual`, into `out`."""
        ...

    def rotate(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: Heads, norms: QKNorms
    ) -> Triple:
        """Return queries, keys and values of packed rows, with queries and keys normalized and rotated; without norms,
        rotated in place."""
        ...

    def rotate_backward(
        self,
        gradients: Triple,
        cos: torch.Tensor,
        sin: torch.Tensor,
        heads: Heads,
        norms: QKNorms,
        raw: torch.Tensor | None,
        out: torch.Tensor,
        quantize: Quantize | None = None,
    ) -> Rows:
        """Write the gradient of the packed rows into `out`. `raw`: the rows before the norms, if there are norms."""
        ...

    def gate(
        self, gate_up: torch.Tensor, kind: str, out: torch.Tensor, quantize: Quantize | None = None
    ) -> Rows:
        """Write act(gate) * up into `out`."""
        ...

    def gate_backward(
        self,
        gradient: torch.Tensor,
        gate_up: torch.Tensor,
        kind: str,
        product: torch.Tensor | None,
        out: torch.Tensor,
        quantize: Quantize | None = None,
    ) -> Rows:
        """Write the packed gradients of gate and up into `out`; rebuild act(gate) * up in `product`, if given."""
        ...

    def quantize_rows(self, values: torch.Tensor, quantize: Quantize) -> Rows:
        """Return rows with their e4m3 copy."""
        ...

    def cross_entropy(
        self, logits: torch.Tensor, targets: torch.Tensor, *, gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the summed cross entropy in fp32, and the gradient of the logits, which may overwrite them."""
        ...


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
