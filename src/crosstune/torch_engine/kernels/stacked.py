"""Linear layers that share an input, with their adapters, in as few matmuls as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from crosstune.estimate.fast_layers import MAX_COLUMNS, adapter_columns
from crosstune.torch_engine.kernels.fp8_weights import (
    Fp8Adapter,
    Fp8Adapters,
    Fp8Weights,
    fits_fp8,
    fp8_weights,
)
from crosstune.torch_engine.kernels.frozen_weights import (
    DenseWeights,
    QuantizedWeights,
    Scratch,
    is_dense,
    stack_biases,
)
from crosstune.torch_engine.kernels.operations import Quantize, Rows
from crosstune.torch_engine.loading.adapters import AdaptedLinear
from crosstune.torch_engine.quantized import linear_shape, weight_device


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The adapter of one layer of a group."""

    a: nn.Parameter
    b: nn.Parameter
    scale: float
    wide_scale: torch.Tensor
    """The scale as a tensor in the dtype of B: multiplying by it converts to that dtype in the same pass."""
    rows: slice
    """The outputs of its layer."""
    columns: slice
    """Its columns in x A of the group."""


class Stacked:
    """y = x W^T + bias + adapters, for the stacked weights W of a group of layers.

    One matmul computes both, where there is room: W is extended by B on the right, and inputs made by our kernels by x A (the
    group is `extended`); for the input gradient W is extended by A below, and the gradient of y by the gradient of x A.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        dtype: torch.dtype,
        scratch: Scratch,
        may_extend: bool,
        fp8: Scratch | None = None,
        copies: bool = False,
    ) -> None:
        """Stack layers. With `fp8`, a buffer for e4m3 weights, quantized layers use fp8 matmul. With `copies`, the layers keep
        their own dense weights, and adapters are merged into copies in fp32, as they are now."""
        bases: list[Any] = [layer.base if isinstance(layer, AdaptedLinear) else layer for layer in layers]
        self.bases = bases
        self.watch: Any = None
        """Observes frozen matmuls: `on_product(inputs, outputs)` and `on_gradient(gradient)` of the outputs."""
        self.fp8_factors: tuple[torch.Tensor, ...] = ()
        """Factors of the columns of x A and of its gradient in fp8 matmuls."""
        self.dtype = dtype
        all_dense = all(is_dense(base) for base in bases)
        merges = copies and all_dense and dtype == torch.float32
        self.adapters = _place_adapters([] if merges else layers)
        self.num_inputs = linear_shape(bases[0])[1]
        used = self.adapters[-1].columns.stop if self.adapters else 0
        self.device = weight_device(bases[0])
        self.extra = adapter_columns(used, on_gpu=self.device.type != "cpu")
        in_fp8 = fp8 is not None and not any(is_dense(base) for base in bases) and fits_fp8(bases)
        self.below = self.extra if not in_fp8 and self.extra <= MAX_COLUMNS else 0
        """The rows of A below W."""
        self.extended = may_extend and self.below > 0
        room = {"right": self.extra if self.extended else 0, "below": self.below}
        self.weights: Any
        if fp8 is not None and in_fp8:
            columns = used if self.extra <= MAX_COLUMNS else 0
            self.weights = fp8_weights(
                bases, dtype=dtype, columns=columns, scratch=scratch, packed_scratch=fp8
            )
        elif all_dense:
            copied = [
                layer.merged() if merges and isinstance(layer, AdaptedLinear) else base.weight.detach()
                for layer, base in zip(layers, bases, strict=True)
            ]
            self.weights = DenseWeights(bases, dtype=dtype, **room, copies=copied if copies else None)
        else:
            self.weights = QuantizedWeights(bases, scratch=scratch, **room)
        self.bias = stack_biases(bases, dtype=dtype)
        if self.below and isinstance(self.weights, DenseWeights):
            self._a = self.weights.rows
        else:
            self._a = torch.zeros(self.extra, self.num_inputs, dtype=dtype, device=self.device)
        self._b = [torch.zeros_like(adapter.b, dtype=dtype) for adapter in self.adapters]
        self._b_columns = self._place_b()

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for adapter in self.adapters for parameter in (adapter.a, adapter.b)]

    @property
    def b_columns(self) -> torch.Tensor | None:
        """All B as a matrix with zeros between them; None if they have separate matmuls."""
        return self._b_columns

    @property
    def in_fp8(self) -> bool:
        return self.weights.row_scales is not None

    @property
    def quantize_inputs(self) -> Quantize | None:
        """The quantization of inputs for the matmul; None if there is none."""
        return Quantize(room=self._fp8_room) if self.in_fp8 else None

    @property
    def quantize_gradients(self) -> Quantize | None:
        return Quantize(self.weights.row_scales, room=self._fp8_room) if self.in_fp8 else None

    @property
    def _fp8_room(self) -> int:
        return self.weights.room if isinstance(self.weights, Fp8Weights) else 0

    def fp8_adapter(self) -> Fp8Adapter | None:
        """Return the adapters as columns of the fp8 matmuls; None if they have separate matmuls."""
        if not self._fp8_room:
            return None
        assert self._b_columns is not None
        count = self.weights.columns
        return Fp8Adapter(weights=self.weights, a=self._a[:count], b=self._b_columns[:, :count])

    def make_input(self, num_rows: int) -> torch.Tensor:
        """Return a buffer for the inputs, with room for x A if the group is extended."""
        width = self.num_inputs + (self.extra if self.extended else 0)
        return torch.empty(num_rows, width, dtype=self.dtype, device=self.device)

    def inputs_in(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[:, : self.num_inputs]

    def make_gradient(self, num_rows: int) -> torch.Tensor:
        """Allocate the gradients of the outputs, with room to the right for the gradients of x A."""
        return rows_with_room(
            num_rows, self.weights.num_outputs, self.below, dtype=self.dtype, device=self.device
        )

    def forward(self, inputs: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs and x A. `inputs` is a whole buffer of `make_input`."""
        low = self.low(inputs.values)
        if self.extended:
            matrix = self.weights.with_columns(self._b_columns)
            if self.bias is None:
                return inputs.values @ matrix.t(), low
            return torch.addmm(self.bias, inputs.values, matrix.t()), low
        if self._fp8_room and self.watch is None:
            out = self.weights.product_with(inputs, low, self.fp8_factors[0])
            return (out if self.bias is None else out.add_(self.bias)), low
        out = self.weights.product(inputs)
        if self.watch is not None:
            self.watch.on_product(inputs.values, out)
        if self.bias is not None:
            out += self.bias
        if self._b_columns is not None:
            out.addmm_(low, self._b_columns.t())
        else:
            for adapter, b in zip(self.adapters, self._b, strict=True):
                out[:, adapter.rows].addmm_(low[:, adapter.columns], b.t())
        return out, low

    def low(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return x A for inputs in a buffer of `make_input`; it is written to the buffer if there is room."""
        if not self.extended:
            return buffer @ self._a.t()
        low = buffer[:, self.num_inputs :]
        torch.mm(self.inputs_in(buffer), self._a.t(), out=low)
        return low

    def backward(
        self, gradient: Rows, inputs: torch.Tensor, low: torch.Tensor, *, need_input: bool
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Return the gradients of the inputs, if needed, and of `parameters`."""
        found, low_gradient = self.input_gradient(gradient, need_input=need_input)
        return found, self.adapter_gradients(gradient.values, inputs, low, low_gradient)

    def input_gradient(
        self, gradient: Rows, *, need_input: bool = True
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the gradients of the inputs, if needed, and of x A."""
        values = gradient.values
        if self.watch is not None:
            self.watch.on_gradient(values)
        whole = whole_rows(values, self.below) if self.below and need_input else None
        if whole is not None:
            low_gradient = whole[:, self.weights.num_outputs :]
            torch.mm(values, self._b_columns, out=low_gradient)
            return whole @ self.weights.with_rows(self._a), low_gradient
        if self._b_columns is not None:
            low_gradient = values @ self._b_columns
        else:
            low_gradient = values.new_zeros(len(values), self.extra)
            for adapter, b in zip(self.adapters, self._b, strict=True):
                torch.mm(values[:, adapter.rows], b, out=low_gradient[:, adapter.columns])
        if self._fp8_room and self.watch is None and need_input:
            found = self.weights.input_gradient_with(gradient, low_gradient, self.fp8_factors[1])
            return found, low_gradient
        found = self.weights.input_gradient(gradient) if need_input else None
        if found is not None and self.extra:
            found.addmm_(low_gradient, self._a)
        return found, low_gradient

    def adapter_gradients(
        self,
        gradient: torch.Tensor,
        inputs: torch.Tensor,
        low: torch.Tensor,
        low_gradient: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Return the gradients of `parameters`. `inputs` is a buffer of `make_input`."""
        if not self.adapters:
            return []
        found = []
        all_a = (low_gradient.t() @ self.inputs_in(inputs)).to(self.adapters[0].a.dtype)
        # One matmul reads the gradient once; with many columns, multiplying other layers' columns costs too much.
        all_b = gradient.t() @ low if self.extra <= MAX_COLUMNS else None
        for adapter in self.adapters:
            if all_b is not None:
                b = all_b[adapter.rows, adapter.columns]
            else:
                b = gradient[:, adapter.rows].t() @ low[:, adapter.columns]
            found += [all_a[adapter.columns], (b * adapter.wide_scale).to(adapter.b.dtype)]
        return found

    def _place_b(self) -> torch.Tensor | None:
        """Return a matrix with all B and zeros between them: the extra columns of a dense matrix, or a separate one. None with
        many columns, where separate matmuls are faster."""
        if not 0 < self.extra <= MAX_COLUMNS:
            return None
        if self.extended and isinstance(self.weights, DenseWeights):
            return self.weights.columns
        return torch.zeros(self.weights.num_outputs, self.extra, dtype=self.dtype, device=self.device)


def rows_with_room(
    num_rows: int, width: int, room: int, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return an empty matrix, the left part of a wider one with room for the output of a matmul."""
    return torch.empty(num_rows, width + room, dtype=dtype, device=device)[:, :width]


def whole_rows(values: torch.Tensor, room: int) -> torch.Tensor | None:
    """Return the wider matrix around `values` of `rows_with_room`; None for other values."""
    num_rows, width = values.shape
    stride = values.stride(0)
    is_left = values.storage_offset() == 0 and values.stride(1) == 1 and stride >= width + room
    if not is_left or values.untyped_storage().nbytes() != num_rows * stride * values.itemsize:
        return None
    return values.as_strided((num_rows, width + room), (stride, 1))


class Publishing:
    """Copy the fp32 adapters into the compute dtype, in a few launches for all layers."""

    def __init__(self, groups: Sequence[Stacked]) -> None:
        found = [(group, adapter) for group in groups for adapter in group.adapters]
        self._a, self._b = [adapter.a for _, adapter in found], [adapter.b for _, adapter in found]
        self._scales = [adapter.scale for _, adapter in found]
        self._a_slots = [group._a[adapter.columns] for group, adapter in found]
        self._b_copies = [b for group in groups for b in group._b]
        self._placed = [b for group in groups if group._b_columns is not None for b in group._b]
        self._places = [
            group._b_columns[adapter.rows, adapter.columns]
            for group, adapter in found
            if group._b_columns is not None
        ]
        in_fp8 = [(group, adapter) for group in groups if (adapter := group.fp8_adapter()) is not None]
        self._fp8 = Fp8Adapters([adapter for _, adapter in in_fp8]) if in_fp8 else None
        for index, (group, _) in enumerate(in_fp8):
            assert self._fp8 is not None
            group.fp8_factors = self._fp8.factors_of(index)

    @torch.no_grad()
    def publish(self) -> None:
        if not self._a:
            return
        torch._foreach_copy_(self._a_slots, self._a)
        torch._foreach_copy_(self._b_copies, torch._foreach_mul(self._b, self._scales))
        if self._places:
            torch._foreach_copy_(self._places, self._placed)
        if self._fp8 is not None:
            self._fp8.publish()


def _place_adapters(layers: Sequence[Any]) -> list[Adapter]:
    adapters: list[Adapter] = []
    row = column = 0
    for layer in layers:
        adapted = isinstance(layer, AdaptedLinear)
        outputs = linear_shape(layer.base if adapted else layer)[0]
        if adapted:
            rank = layer.lora_A.shape[0]
            adapters.append(
                Adapter(
                    a=layer.lora_A,
                    b=layer.lora_B,
                    scale=layer.scale,
                    wide_scale=layer.lora_B.new_full((1,), layer.scale, requires_grad=False),
                    rows=slice(row, row + outputs),
                    columns=slice(column, column + rank),
                )
            )
            column += rank
        row += outputs
    return adapters
