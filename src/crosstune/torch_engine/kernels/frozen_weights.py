"""Hold the frozen weights of linear layers that share an input as one matrix: dense, or quantized and dequantized at each use.

All forms, including fp8, have `num_outputs`, `num_inputs`, `product` (inputs @ W.T), `input_gradient` (gradient @ W) and
`row_scales`, None unless gradients are quantized. Forms with dense matmuls also have the `matrix`, `with_columns` on the
right and `with_rows` below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from crosstune.torch_engine.kernels.operations import Rows, has_triton
from crosstune.torch_engine.quantized import QuantLinear

Copy = tuple[torch.Tensor, torch.Tensor]
"""A matrix to copy in the launch that dequantizes weights, and its target."""


class _DenseMatmul:
    """Dense matmuls with the stacked weights."""

    row_scales: torch.Tensor | None = None

    def __init__(self, bases: Sequence[Any]) -> None:
        self.num_outputs, self.num_inputs = stacked_shape(bases)

    def matrix(self) -> torch.Tensor:
        raise NotImplementedError

    def product(self, inputs: Rows) -> torch.Tensor:
        return inputs.values @ self.matrix().t()

    def input_gradient(self, gradient: Rows) -> torch.Tensor:
        return gradient.values @ self.matrix()


class DenseWeights(_DenseMatmul):
    """Dense weights, stacked once; the layers keep views of their rows, unless other weights are given as `copies`. The caller
    fills the `columns` on the right and the `rows` below."""

    def __init__(
        self,
        bases: Sequence[Any],
        *,
        dtype: torch.dtype,
        right: int = 0,
        below: int = 0,
        copies: Sequence[torch.Tensor] | None = None,
    ) -> None:
        super().__init__(bases)
        if len(bases) == 1 and not right and not below and bases[0].weight.dtype == dtype:
            self._matrix = bases[0].weight.detach() if copies is None else copies[0]
        else:
            size = (self.num_outputs + below, self.num_inputs + right)
            self._matrix = torch.zeros(size, dtype=dtype, device=bases[0].weight.device)
            for number, (base, rows) in enumerate(each_rows(bases)):
                place = self._matrix[rows, : self.num_inputs]
                place.copy_(base.weight.detach() if copies is None else copies[number])
                if copies is None:
                    base.weight.data = place
        self.columns = self._matrix[: self.num_outputs, self.num_inputs :]
        self.rows = self._matrix[self.num_outputs :, : self.num_inputs]

    def matrix(self) -> torch.Tensor:
        return self._matrix[: self.num_outputs, : self.num_inputs]

    def with_columns(self, columns: torch.Tensor) -> torch.Tensor:
        assert columns.data_ptr() == self.columns.data_ptr()
        return self._matrix[: self.num_outputs]

    def with_rows(self, rows: torch.Tensor) -> torch.Tensor:
        assert rows.data_ptr() == self.rows.data_ptr()
        return self._matrix[:, : self.num_inputs]


class Scratch:
    """A buffer for dequantized weights, shared by all layers; it grows to the largest."""

    def __init__(self, *, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=dtype, device=device)

    def take(self, rows: int, columns: int) -> torch.Tensor:
        if self._buffer.numel() < rows * columns:
            self._buffer = self._buffer.new_empty(rows * columns)
        return self._buffer[: rows * columns].view(rows, columns)

    def empty(self, rows: int, columns: int) -> torch.Tensor:
        """Return an empty matrix that is not shared."""
        return self._buffer.new_empty(rows, columns)


class QuantizedWeights(_DenseMatmul):
    """Weights of layers, some or all quantized, dequantized into a shared buffer at each use, or between `keep` and `drop`
    once."""

    def __init__(self, bases: Sequence[Any], *, scratch: Scratch, right: int = 0, below: int = 0) -> None:
        super().__init__(bases)
        self.bases, self._scratch = bases, scratch
        self._right = right
        self._kept: torch.Tensor | None = None
        # Allocate now, not in the middle of an evaluation.
        scratch.take(self.num_outputs, self.num_inputs + right)
        scratch.take(self.num_outputs + below, self.num_inputs)

    @property
    def is_kept(self) -> bool:
        return self._kept is not None

    @property
    def num_kept(self) -> int:
        """Elements of the weights that `keep` makes."""
        return self.num_outputs * (self.num_inputs + self._right)

    def keep(self, columns: torch.Tensor | None) -> None:
        """Dequantize the weights once, with these columns on the right, which must not change until `drop`."""
        size = (self.num_outputs, self.num_inputs + self._right)
        kept = self._scratch.empty(*size)
        copied = (columns, kept[:, self.num_inputs :]) if self._right and columns is not None else None
        self._make_dense(kept[:, : self.num_inputs], copied)
        self._kept = kept

    def drop(self) -> None:
        self._kept = None

    def matrix(self) -> torch.Tensor:
        if self._kept is not None:
            return self._kept[:, : self.num_inputs]
        dense = self._scratch.take(self.num_outputs, self.num_inputs)
        self._make_dense(dense)
        return dense

    def with_columns(self, columns: torch.Tensor) -> torch.Tensor:
        if self._kept is not None:
            return self._kept
        dense = self._scratch.take(self.num_outputs, self.num_inputs + columns.shape[1])
        self._make_dense(dense[:, : self.num_inputs], (columns, dense[:, self.num_inputs :]))
        return dense

    def with_rows(self, rows: torch.Tensor) -> torch.Tensor:
        dense = self._scratch.take(self.num_outputs + len(rows), self.num_inputs)
        self._make_dense(dense[: self.num_outputs], (rows, dense[self.num_outputs :]))
        return dense

    def _make_dense(self, out: torch.Tensor, copy: Copy | None = None) -> None:
        for base, rows in each_rows(self.bases):
            make_dense(base, out[rows], copy=None if rows.start else copy)


def make_dense(
    base: Any, out: torch.Tensor, *, row_scales: torch.Tensor | None = None, copy: Copy | None = None
) -> None:
    """Write the weight of a layer into `out`, whose rows may be strided, and make `copy`. NF4 weights on a GPU may be divided
    by `row_scales`, for an `out` in e4m3."""
    if not is_dense(base) and has_own_kernel(base, out.device):
        from crosstune.torch_engine.kernels.triton_operations import make_nf4_dense

        make_nf4_dense(base.stored.tensors(), base.stored.facts, out, row_scales=row_scales, copied=copy)
        return
    assert row_scales is None
    out.copy_(base.weight.detach() if is_dense(base) else base.stored.dequantize(out.dtype))
    if copy is not None:
        copy[1].copy_(copy[0])


def has_own_kernel(base: QuantLinear, device: torch.device) -> bool:
    """Return True if our kernel can dequantize a layer: NF4 on a GPU, in rows of multiples of 8 weights."""
    is_nf4 = base.stored.facts.get("quant_type") == "nf4" and base.in_features % 8 == 0
    return device.type == "cuda" and is_nf4 and has_triton()


def stack_biases(bases: Sequence[Any], *, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the concatenated biases of the layers; None if no layer has one."""
    biases = [base.bias for base in bases]
    if all(bias is None for bias in biases):
        return None
    device = next(bias.device for bias in biases if bias is not None)
    stacked = torch.zeros(stacked_shape(bases)[0], dtype=dtype, device=device)
    for base, rows in each_rows(bases):
        if base.bias is not None:
            stacked[rows] = base.bias.detach()
    return stacked


def is_dense(base: Any) -> bool:
    return isinstance(base, nn.Linear) and not isinstance(base, QuantLinear)


def stacked_shape(bases: Sequence[Any]) -> tuple[int, int]:
    """Return the outputs and inputs of stacked layers."""
    return sum(base.out_features for base in bases), bases[0].in_features


def each_rows(bases: Sequence[Any]) -> Iterator[tuple[Any, slice]]:
    """Yield each layer with its rows of the stacked matrix."""
    stop = 0
    for base in bases:
        start, stop = stop, stop + base.out_features
        yield base, slice(start, stop)
