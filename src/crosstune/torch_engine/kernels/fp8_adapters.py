"""Write adapters to the left of their frozen fp8 weights, as sums of two e4m3 parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from crosstune.torch_engine.kernels.fp8_weights import Fp8Weights
from crosstune.torch_engine.kernels.operations import LINES_IN_TILE


@dataclass(frozen=True, kw_only=True)
class Side:
    """A or B of an adapter, and the place for its parts. Each line belongs to a row of the frozen matrix."""

    lines: torch.Tensor
    """Lines x columns, in any strides."""
    scales: torch.Tensor | None
    """Divisors of the lines; None for ones."""
    target: torch.Tensor
    """The place for the parts: lines x (3 times the columns, or more), in e4m3."""
    length: int
    """The length of the sums that the other side multiplies."""


@dataclass(frozen=True, kw_only=True)
class Fp8Adapter:
    """The adapters of a group as columns of its fp8 matmuls."""

    weights: Fp8Weights
    a: torch.Tensor
    """Columns x inputs."""
    b: torch.Tensor
    """Outputs x columns, with the scale of each adapter."""

    def sides(self) -> tuple[Side, Side]:
        """Return the factors of x A and of the gradient of x A."""
        weights = self.weights
        forward = Side(
            lines=self.b,
            scales=weights.row_scales,
            target=weights.weights[:, : weights.room],
            length=weights.num_inputs,
        )
        backward = Side(
            lines=self.a.t(),
            scales=None,
            target=weights.transposed[:, : weights.room],
            length=weights.num_outputs,
        )
        return forward, backward


class Fp8Adapters:
    """Write the adapters of all groups, hundreds in a model, in two launches."""

    def __init__(self, adapters: Sequence[Fp8Adapter]) -> None:
        sides = [side for adapter in adapters for side in adapter.sides()]
        device = sides[0].lines.device
        ones = torch.ones(max(len(side.lines) for side in sides), device=device)
        self._keep = (sides, ones)  # the table holds their addresses
        self.dtype = sides[0].lines.dtype
        self.table = torch.tensor([_fields(side, ones) for side in sides], device=device)
        tiles = [
            (index, start)
            for index, side in enumerate(sides)
            for start in range(0, len(side.lines), LINES_IN_TILE)
        ]
        self.tile_sides, self.tile_starts = (
            torch.tensor([tile[place] for tile in tiles], dtype=torch.int32, device=device)
            for place in range(2)
        )
        width = 1 << (max(side.lines.shape[1] for side in sides) - 1).bit_length()  # a power of two
        self.largest = torch.zeros(len(sides), width, dtype=torch.int32, device=device)
        self.factors = torch.ones(len(sides), width, device=device)

    def publish(self) -> None:
        from crosstune.torch_engine.kernels import triton_operations

        triton_operations.write_fp8_adapters(
            self.table,
            (self.tile_sides, self.tile_starts),
            largest=self.largest,
            factors=self.factors,
            dtype=self.dtype,
        )

    def factors_of(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors of the columns of x A and of its gradient for one adapter."""
        return self.factors[2 * index], self.factors[2 * index + 1]


def _fields(side: Side, ones: torch.Tensor) -> list[int]:
    num_lines, num_columns = side.lines.shape
    scales = ones if side.scales is None else side.scales
    assert side.target.shape[0] == num_lines and scales.dtype == torch.float32 and len(scales) >= num_lines
    return [
        side.lines.data_ptr(),
        *side.lines.stride(),
        num_lines,
        scales.data_ptr(),
        side.target.data_ptr(),
        side.target.stride(0),
        num_columns,
        side.length,
    ]
