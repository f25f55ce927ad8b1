"""Write adapters to the left of their frozen fp8 weights, as sums of two e4m3 parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from crosstune.torch_engine.kernels.fp8_weights import Fp8Weights
from crosstune.torch_engine.kernels.operations import LINES_IN_TILE


@dataclass(frozen=True, kw_only=True)
class Fp8Adapter:
    """The adapters of a group as columns of its fp8 matmuls."""

    weights: Fp8Weights
    a: torch.Tensor
    """Columns x inputs."""
    b: torch.Tensor
    """Outputs x columns, with the scale of each adapter."""


class Fp8Adapters:
    """Write the adapters of all groups, hundreds in a model, in two launches.

    Each adapter has two sides: B for x A, and A for the gradient of x A. Each line of a side belongs to a row of the frozen
    matrix.
    """

    def __init__(self, adapters: Sequence[Fp8Adapter]) -> None:
        device, self.dtype = adapters[0].a.device, adapters[0].a.dtype
        ones = torch.ones(max(adapter.weights.num_inputs for adapter in adapters), device=device)
        self._keep = (adapters, ones)  # the table holds their addresses
        rows: list[tuple[int, ...]] = []
        tiles, width = [], 0
        for adapter in adapters:
            weights, room = adapter.weights, adapter.weights.room
            for lines, scales, target, length in (
                (adapter.b, weights.row_scales, weights.weights[:, :room], weights.num_inputs),
                (adapter.a.t(), ones, weights.transposed[:, :room], weights.num_outputs),
            ):
                count, columns = lines.shape
                assert len(target) == count <= len(scales) and scales.dtype == torch.float32
                tiles += [(len(rows), start) for start in range(0, count, LINES_IN_TILE)]
                width = max(width, columns)
                # The fields of triton_fp8_adapters.NUM_FIELDS.
                source = (lines.data_ptr(), *lines.stride(), count, scales.data_ptr())
                rows.append((*source, target.data_ptr(), target.stride(0), columns, length))
        self.table = torch.tensor(rows, device=device)
        self.tile_sides, self.tile_starts = (
            torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in zip(*tiles, strict=True)
        )
        width = 1 << (width - 1).bit_length()  # a power of two
        self.largest = torch.zeros(len(rows), width, dtype=torch.int32, device=device)
        self.factors = torch.ones(len(rows), width, device=device)

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
