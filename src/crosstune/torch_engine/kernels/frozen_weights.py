"""Hold the frozen weights of linear layers that share an input as one matrix: dense, or quantized and made dense at each
use.

All forms of weights, those in fp8 too, have `num_outputs`, `num_inputs`, `product` (inputs @ W.T), `input_gradient`
(gradient @ W) and `row_scales`, which is None unless gradients are quantized for them. `matrix` of the dense forms has `extra`
columns on the right, which belong to the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from crosstune.torch_engine.kernels.operations import Rows, has_triton
from crosstune.torch_engine.quantized import QuantLinear, linear_shape


class DenseWeights:
    """Dense weights, stacked once. The layers keep views of their rows, so there is no second copy."""

    row_scales: torch.Tensor | None = None

    def __init__(self, bases: Sequence[Any], *, dtype: torch.dtype, extra: int) -> None:
        self.num_outputs = sum(linear_shape(base)[0] for base in bases)
        self.num_inputs = linear_shape(bases[0])[1]
        self.extra = extra
        if len(bases) == 1 and not extra and bases[0].weight.dtype == dtype:
            self._matrix = bases[0].weight.detach()
            return
        first = bases[0].weight
        width = self.num_inputs + extra
        self._matrix = torch.zeros(self.num_outputs, width, dtype=dtype, device=first.device)
        start = 0
        for base in bases:
            rows = self._matrix[start : start + base.out_features, : self.num_inputs]
            rows.copy_(base.weight.detach())
            base.weight.data = rows
            start += base.out_features

    def matrix(self) -> torch.Tensor:
        return self._matrix

    def product(self, inputs: Rows) -> torch.Tensor:
        return inputs.values @ self._matrix.t()

    def input_gradient(self, gradient: Rows) -> torch.Tensor:
        return gradient.values @ self._matrix


class Scratch:
    """One buffer for the dense form of whichever quantized weights are in use; it grows to the largest."""

    def __init__(self, *, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=dtype, device=device)

    def take(self, rows: int, columns: int) -> torch.Tensor:
        if self._buffer.numel() < rows * columns:
            self._buffer = self._buffer.new_empty(rows * columns)
        return self._buffer[: rows * columns].view(rows, columns)


class QuantizedWeights:
    """Quantized weights, made dense into a shared buffer at each use."""

    row_scales: torch.Tensor | None = None

    def __init__(self, bases: Sequence[QuantLinear], *, scratch: Scratch, extra: int) -> None:
        self.bases, self.extra, self._scratch = bases, extra, scratch
        self.num_outputs = sum(base.out_features for base in bases)
        self.num_inputs = bases[0].in_features
        scratch.take(
            self.num_outputs, self.num_inputs + extra
        )  # made now, not in the middle of an evaluation

    def matrix(self, columns: torch.Tensor | None = None) -> torch.Tensor:
        """Return the dense weights, with `columns` to their right if there is room for them."""
        dense = self._scratch.take(self.num_outputs, self.num_inputs + self.extra)
        start = 0
        for base in self.bases:
            rows = slice(start, start + base.out_features)
            if columns is None:
                make_dense(base, dense[rows, : self.num_inputs])
            else:
                make_dense(base, dense[rows], columns=columns[rows])
            start = rows.stop
        return dense

    def product(self, inputs: Rows) -> torch.Tensor:
        return inputs.values @ self.matrix().t()

    def input_gradient(self, gradient: Rows) -> torch.Tensor:
        return gradient.values @ self.matrix()


def make_dense(
    base: QuantLinear,
    out: torch.Tensor,
    *,
    row_scales: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
) -> None:
    """Write the dense weight of a quantized layer into `out`, whose rows may be strided, and `columns` to its right. NF4
    weights on a GPU may be divided by `row_scales`, for an `out` in e4m3."""
    stored = base.stored
    if takes_row_scales(base, out.device):
        from crosstune.torch_engine.kernels.triton_operations import make_nf4_dense

        make_nf4_dense(stored.tensors(), stored.facts, out, row_scales=row_scales, columns=columns)
        return
    assert row_scales is None
    out[:, : base.in_features] = stored.dequantize(out.dtype)
    if columns is not None:
        out[:, base.in_features :] = columns


def takes_row_scales(base: QuantLinear, device: torch.device) -> bool:
    """Return whether our own kernel makes a layer dense: it takes 8 weights of a row at a time."""
    is_nf4 = base.stored.facts.get("quant_type") == "nf4" and base.in_features % 8 == 0
    return device.type == "cuda" and is_nf4 and has_triton()


def stack_biases(bases: Sequence[Any], *, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the biases of the layers in one row; None if no layer has one."""
    if all(base.bias is None for base in bases):
        return None
    device = next(base.bias.device for base in bases if base.bias is not None)
    return torch.cat(
        [
            torch.zeros(linear_shape(base)[0], dtype=dtype, device=device)
            if base.bias is None
            else base.bias.detach().to(dtype)
            for base in bases
        ]
    )


def is_dense(base: Any) -> bool:
    return isinstance(base, nn.Linear) and not isinstance(base, QuantLinear)
