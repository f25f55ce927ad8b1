"""fp8 matmuls with frozen weights: stored in e4m3 in both layouts, with adapters on their left as sums of two e4m3 parts; or
converted to e4m3 at each use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from crosstune.torch_engine.kernels.frozen_weights import (
    QuantizedWeights,
    Scratch,
    each_rows,
    has_own_kernel,
    make_dense,
    stacked_shape,
)
from crosstune.torch_engine.kernels.operations import LINES_IN_TILE, NUM_PARTS, Rows, has_triton
from crosstune.torch_engine.quant.fp8 import row_scales
from crosstune.torch_engine.quantized import QuantLinear

E4M3 = torch.float8_e4m3fn
_ALIGNED = 16
"""Tensor cores need sides that are multiples of this."""
_ALIGNED_ROOM = 64
"""The room for adapters is a multiple of this: with other row lengths, matmuls were a fifth slower."""
_WIDEST = 2.0**12
"""The largest ratio of row scales in a group whose adapters are in its fp8 matmuls. A column of an adapter is divided by the
scales and must fit e4m3: with a larger ratio, its numbers for usual rows would have no bits left."""


class Fp8Weights:
    """Weights stored by the fp8 quantizer. The layers keep views of the stacked rows; input gradients use the transposed copy,
    since tensor cores read e4m3 in one layout only. Both have `room` on the left for `columns` of adapters."""

    def __init__(self, bases: Sequence[QuantLinear], *, dtype: torch.dtype, columns: int = 0) -> None:
        self.num_outputs, self.num_inputs = stacked_shape(bases)
        self.row_scales = _stack_scales(bases)
        if columns and bool(self.row_scales.amax() > _WIDEST * self.row_scales.amin()):
            columns = 0
        self.dtype, self.columns = dtype, columns
        room = self.room = _round_up(NUM_PARTS * columns, _ALIGNED_ROOM)
        like = bases[0].stored.tensors()["packed"]
        packed = like.new_zeros(self.num_outputs, self.num_inputs + room)
        for base, rows in each_rows(bases):
            place = packed[rows, room:]
            place.copy_(base.stored.tensors()["packed"])
            base.stored.packed = nn.Parameter(place, requires_grad=False)
        self.weights = packed.view(E4M3)
        transposed = like.new_zeros(self.num_inputs, self.num_outputs + room)
        transposed[:, room:] = packed[:, room:].t()
        self.transposed = transposed.view(E4M3)
        self._ones = torch.ones(1, self.num_inputs, device=packed.device)

    def product(self, inputs: Rows) -> torch.Tensor:
        return scaled_product(inputs, self.weights[:, self.room :], self.row_scales[None], self.dtype)

    def input_gradient(self, gradient: Rows) -> torch.Tensor:
        return scaled_product(gradient, self.transposed[:, self.room :], self._ones, self.dtype)

    def product_with(self, inputs: Rows, low: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Return inputs @ W.T plus x A @ B.T."""
        prepend_low(inputs, low, self.columns, factors)
        return scaled_product(inputs, self.weights, self.row_scales[None], self.dtype)

    def input_gradient_with(self, gradient: Rows, low: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Return the gradients @ W plus the gradients of x A @ A."""
        prepend_low(gradient, low, self.columns, factors, self.row_scales)
        return scaled_product(gradient, self.transposed, self._ones, self.dtype)

    def dense(self) -> torch.Tensor:
        return (self.weights[:, self.room :].float() * self.row_scales[:, None]).to(self.dtype)


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


class ComputedInFp8(QuantizedWeights):
    """Weights of a different quantizer, such as NF4, converted to e4m3 in a shared buffer at each use, with fixed row scales."""

    def __init__(
        self, bases: Sequence[QuantLinear], *, dtype: torch.dtype, scratch: Scratch, packed_scratch: Scratch
    ) -> None:
        super().__init__(bases, scratch=scratch)
        self.dtype, self._packed_scratch = dtype, packed_scratch
        self._scales = self.row_scales = row_scales(self.matrix())
        self._ones = torch.ones(1, self.num_inputs, device=self._scales.device)
        packed_scratch.take(self.num_outputs, self.num_inputs)

    def product(self, inputs: Rows) -> torch.Tensor:
        return scaled_product(inputs, self._packed(), self._scales[None], self.dtype)

    def input_gradient(self, gradient: Rows) -> torch.Tensor:
        transposed = self._packed().view(torch.uint8).t().contiguous().view(E4M3)
        return scaled_product(gradient, transposed, self._ones, self.dtype)

    def _packed(self) -> torch.Tensor:
        packed = self._packed_scratch.take(self.num_outputs, self.num_inputs)
        for base, rows in each_rows(self.bases):
            if has_own_kernel(base, packed.device):
                make_dense(base, packed[rows], row_scales=self._scales[rows])
            else:
                dense = base.stored.dequantize(self.dtype)
                packed[rows] = (dense.float() / self._scales[rows, None]).to(E4M3)
        return packed


def fp8_weights(
    bases: Sequence[QuantLinear],
    *,
    dtype: torch.dtype,
    columns: int,
    scratch: Scratch,
    packed_scratch: Scratch,
) -> Fp8Weights | ComputedInFp8:
    """Return the fp8 form of a group's quantized weights, with room for `columns` of adapters if its matmuls can include them."""
    if all(base.stored.quantizer == "fp8" for base in bases):
        device = bases[0].stored.packed.device
        in_products = device.type == "cuda" and has_triton()
        return Fp8Weights(bases, dtype=dtype, columns=_round_up(columns, _ALIGNED) if in_products else 0)
    return ComputedInFp8(bases, dtype=dtype, scratch=scratch, packed_scratch=packed_scratch)


def scaled_product(
    rows: Rows, weights: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return rows @ weights.T of e4m3 matrices, with their scales. Tensor cores add in fewer bits (`use_fast_accum`). Extra
    columns on the left of the rows are ignored."""
    assert rows.packed is not None and rows.scale is not None
    packed = rows.packed[:, rows.packed.shape[1] - weights.shape[1] :]
    if packed.device.type == "cuda":
        return torch._scaled_mm(
            packed,
            weights.t(),
            scale_a=rows.scale,
            scale_b=scales,
            out_dtype=dtype,
            use_fast_accum=True,
        )
    return ((packed.float() @ weights.float().t()) * rows.scale * scales).to(dtype)


def fits_fp8(bases: Sequence[Any]) -> bool:
    """Return True if fp8 tensor cores support the shapes of a group."""
    outputs, inputs = stacked_shape(bases)
    return outputs % _ALIGNED == 0 and inputs % _ALIGNED == 0


def why_no_fp8(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why fp8 matmuls with row scales do not run on a device, found by a trial; None if they do."""
    if device.type == "cpu":
        return None  # computed in fp32
    if device.type != "cuda":
        return f"{device.type} does not support fp8 matmul"
    if dtype != torch.bfloat16:
        return "fp8 matmuls return bf16"
    ones = torch.ones(16, 16, device=device)
    try:
        scaled_product(
            Rows(ones, ones.to(E4M3), torch.ones(16, 1, device=device)),
            ones.to(E4M3),
            torch.ones(1, 16, device=device),
            dtype,
        )
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def prepend_low(
    rows: Rows, low: torch.Tensor, count: int, factors: torch.Tensor, columns: torch.Tensor | None = None
) -> None:
    from crosstune.torch_engine.kernels import triton_operations

    triton_operations.prepend_low(rows, low, count, factors, columns)


def _stack_scales(bases: Sequence[QuantLinear]) -> torch.Tensor:
    """Return the scale of each row; rows of zeros get the median instead of the smallest."""
    parts = [base.stored.tensors() for base in bases]
    scales = torch.cat([part["scale"] for part in parts]).float()
    filled = torch.cat([(part["packed"] & 0x7F).amax(dim=1) > 0 for part in parts])
    return torch.where(filled, scales, scales[filled].median()) if bool(filled.any()) else scales


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
