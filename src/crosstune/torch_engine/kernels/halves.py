"""The halves of a decoder layer, attention and MLP, as autograd functions with hand-written backward passes.

The residual stream is passed on as two summands, the stream and the output of the last half. The next half adds them in the
kernel of its norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from crosstune.torch_engine.kernels.attention import Documents, attend
from crosstune.torch_engine.kernels.operations import Heads, Norm, Operations, QKNorms, Rows
from crosstune.torch_engine.kernels.stacked import Stacked, rows_with_room

Stream = tuple[torch.Tensor, torch.Tensor | None]
"""The residual stream, tokens x width, and the output to be added to it."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention over queries, keys and values of rows x length x heads x size, in that layout."""


@dataclass(frozen=True, kw_only=True)
class AttentionHalf:
    norm: Norm
    qkv: Stacked
    out: Stacked
    heads: Heads
    scale: float
    window: int | None
    rope: str
    """The kind of rotary table."""
    qk_norms: QKNorms = None
    post_norm: Norm | None = None


@dataclass(frozen=True, kw_only=True)
class MLPHalf:
    norm: Norm
    gate_up: Stacked
    down: Stacked
    activation: str
    post_norm: Norm | None = None


class Recomputing:
    """Mark the recomputation of a layer in the backward pass, where its outputs are not needed.

    It is entered for each backward pass through the same graph.
    """

    on = False

    def __enter__(self) -> None:
        self.on = True

    def __exit__(self, *_: object) -> None:
        self.on = False


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The arguments of a forward pass that all layers share."""

    operations: Operations
    documents: Documents
    tables: dict[str, tuple[torch.Tensor, torch.Tensor]]
    """Cosines and sines by kind of rotary table: tokens of a row, or of all rows, x rotary / 2."""
    recomputing: Recomputing = field(default_factory=Recomputing)
    room: int = 0
    """Spare columns to the right of the residual gradient, for the last matmul of each half."""

    def make_gradient(self, total: torch.Tensor, num_rows: int | None = None) -> torch.Tensor:
        """Allocate the residual gradient, with as many rows as `total` or `num_rows`."""
        count, width = total.shape
        num_rows = count if num_rows is None else num_rows
        return rows_with_room(num_rows, width, self.room, dtype=total.dtype, device=total.device)


def run_attention(
    stream: Stream, half: AttentionHalf, given: Pass, *, keep: bool, cached: Attend | None = None
) -> Stream:
    """Apply attention. `keep` saves the normalized inputs for the backward pass; otherwise they are rebuilt. `cached` replaces
    the attention within the documents."""
    total, q, k, v = _AttentionInput.apply(*stream, half, given, keep, *half.qkv.parameters)
    if cached is not None:
        attended = cached(q, k, v)
    else:
        attended = attend(q, k, v, documents=given.documents, scale=half.scale, window=half.window)
    added: torch.Tensor = _AttentionOutput.apply(attended, half, given.operations, *half.out.parameters)
    return total, added


def run_mlp(stream: Stream, half: MLPHalf, given: Pass, *, keep: bool) -> Stream:
    total, added = _MLP.apply(*stream, half, given, keep, *half.gate_up.parameters, *half.down.parameters)
    return total, added


def add_and_normalize(stream: Stream, norm: Norm, given: Pass, rows: torch.Tensor | None) -> torch.Tensor:
    """Return the normalized sum of the stream, for all rows or for some."""
    normalized: torch.Tensor = _AddAndNormalize.apply(*stream, norm, given, rows)
    return normalized


class _AttentionInput(torch.autograd.Function):
    """Norm, stacked QKV projection with its adapters, and rotation."""

    @staticmethod
    def forward(
        ctx: Any,
        stream: torch.Tensor,
        added: torch.Tensor | None,
        half: AttentionHalf,
        given: Pass,
        keep: bool,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        operations, qkv = given.operations, half.qkv
        buffer = qkv.make_input(len(stream))
        total, rstd, rows = operations.rms_norm(
            stream, added, half.norm, qkv.inputs_in(buffer), qkv.quantize_inputs
        )
        packed, low = qkv.forward(replace(rows, values=buffer))
        parts = operations.rotate(packed, *given.tables[half.rope], half.heads, half.qk_norms)
        ctx.half, ctx.given, ctx.added = half, given, added.dtype if added is not None else None
        ctx.save_for_backward(
            total,
            rstd,
            low if keep else low.contiguous(),  # copied, so that the buffer can be freed
            buffer if keep else None,
            packed if half.qk_norms is not None else None,
        )
        shape = (given.documents.num_rows, given.documents.length)
        q, k, v = (part.view(*shape, *part.shape[1:]) for part in parts)
        return total, q, k, v

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        half, operations = ctx.half, ctx.given.operations
        total, rstd, low, buffer, raw = ctx.saved_tensors
        residual, q, k, v = gradients
        rows = operations.rotate_backward(
            (q, k, v),
            *ctx.given.tables[half.rope],
            half.heads,
            half.qk_norms,
            raw,
            half.qkv.make_gradient(len(total)),
            half.qkv.quantize_gradients,
        )
        buffer = _rebuild_norm(operations, total, rstd, half.norm, half.qkv, buffer)
        need_input = any(ctx.needs_input_grad[:2])
        found, adapters = half.qkv.backward(rows, buffer, low, need_input=need_input)
        if found is None:
            return None, None, None, None, None, *adapters
        place = ctx.given.make_gradient(total)
        stream = operations.rms_norm_backward(found, total, rstd, half.norm, residual, place)
        return stream, _added(ctx, stream), None, None, None, *adapters


class _AttentionOutput(torch.autograd.Function):
    """The output projection with its adapter, and the norm after it in models that have one."""

    @staticmethod
    def forward(
        ctx: Any,
        attended: torch.Tensor,
        half: AttentionHalf,
        operations: Operations,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        flat = attended.reshape(-1, half.heads.num_queries * half.heads.size).to(half.out.dtype)
        out, low, product, rstd = _product(flat, half.out, half.post_norm, operations)
        ctx.half, ctx.operations, ctx.shape = half, operations, attended.shape
        ctx.save_for_backward(flat, low, product, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        half, operations = ctx.half, ctx.operations
        flat, low, product, rstd = ctx.saved_tensors
        rows = _before_post_norm(gradients[0], product, rstd, half.post_norm, half.out, operations)
        found, adapters = half.out.backward(rows, flat, low, need_input=ctx.needs_input_grad[0])
        return found.view(ctx.shape) if found is not None else None, None, None, *adapters


class _MLP(torch.autograd.Function):
    """Norm, stacked gate-up projection, activation and down projection, with their adapters."""

    @staticmethod
    def forward(
        ctx: Any,
        stream: torch.Tensor,
        added: torch.Tensor | None,
        half: MLPHalf,
        given: Pass,
        keep: bool,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        operations, gate_up, down = given.operations, half.gate_up, half.down
        buffer = gate_up.make_input(len(stream))
        total, rstd, rows = operations.rms_norm(
            stream, added, half.norm, gate_up.inputs_in(buffer), gate_up.quantize_inputs
        )
        both, low = gate_up.forward(replace(rows, values=buffer))
        inner = down.make_input(len(stream))
        product = post_rstd = None
        if given.recomputing.on and half.post_norm is None:
            operations.gate(both, half.activation, down.inputs_in(inner))
            low_down = down.low(inner)
            out = inner.new_empty(()).expand(len(stream), down.weights.num_outputs)  # nothing reads it
        else:
            rows = operations.gate(both, half.activation, down.inputs_in(inner), down.quantize_inputs)
            out, low_down, product, post_rstd = _product(
                inner, down, half.post_norm, operations, rows=replace(rows, values=inner)
            )
        ctx.half, ctx.given, ctx.added = half, given, added.dtype if added is not None else None
        lows = (low if keep else low.contiguous(), low_down.contiguous())
        ctx.save_for_backward(total, rstd, both, *lows, buffer if keep else None, product, post_rstd)
        return total, out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        half, operations = ctx.half, ctx.given.operations
        total, rstd, both, low, low_down, buffer, product, post_rstd = ctx.saved_tensors
        residual, gradient = gradients
        rows = _before_post_norm(gradient, product, post_rstd, half.post_norm, half.down, operations)
        inner = half.down.make_input(len(total))  # rebuilt by the kernel that reads both factors
        active, low_gradient = half.down.input_gradient(rows)
        found = operations.gate_backward(
            active,
            both,
            half.activation,
            half.down.inputs_in(inner),
            half.gate_up.make_gradient(len(total)),
            half.gate_up.quantize_gradients,
        )
        down_adapters = half.down.adapter_gradients(rows.values, inner, low_down, low_gradient)
        buffer = _rebuild_norm(operations, total, rstd, half.norm, half.gate_up, buffer)
        need_input = any(ctx.needs_input_grad[:2])
        stream, adapters = half.gate_up.backward(found, buffer, low, need_input=need_input)
        if stream is not None:
            place = ctx.given.make_gradient(total)
            stream = operations.rms_norm_backward(stream, total, rstd, half.norm, residual, place)
        return stream, _added(ctx, stream), None, None, None, *adapters, *down_adapters


class _AddAndNormalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        stream: torch.Tensor,
        added: torch.Tensor | None,
        norm: Norm,
        given: Pass,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.num_rows = len(stream)
        if rows is not None:
            stream = stream.index_select(0, rows)
            added = added.index_select(0, rows) if added is not None else None
        total, rstd, normalized = given.operations.rms_norm(stream, added, norm, torch.empty_like(stream))
        ctx.norm, ctx.given, ctx.added = norm, given, added.dtype if added is not None else None
        ctx.save_for_backward(total, rstd, rows)
        return normalized.values

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        total, rstd, rows = ctx.saved_tensors
        place = ctx.given.make_gradient(total)
        stream = ctx.given.operations.rms_norm_backward(gradients[0], total, rstd, ctx.norm, None, place)
        if rows is not None:
            stream = ctx.given.make_gradient(total, ctx.num_rows).zero_().index_add_(0, rows, stream)
        return stream, _added(ctx, stream), None, None, None


def _product(
    inputs: torch.Tensor,
    stacked: Stacked,
    post_norm: Norm | None,
    operations: Operations,
    rows: Rows | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the output of a half and x A; with a norm after the matmul also the norm's input and its 1 / rms."""
    if rows is None:
        quantize = stacked.quantize_inputs
        rows = Rows(inputs) if quantize is None else operations.quantize_rows(inputs, quantize)
    out, low = stacked.forward(rows)
    if post_norm is None:
        return out, low, None, None
    _, rstd, normalized = operations.rms_norm(out, None, post_norm, torch.empty_like(out))
    return normalized.values, low, out, rstd


def _before_post_norm(
    gradient: torch.Tensor,
    product: torch.Tensor | None,
    rstd: torch.Tensor | None,
    post_norm: Norm | None,
    stacked: Stacked,
    operations: Operations,
) -> Rows:
    """Return the gradient of a half's last matmul, quantized if the matmul was."""
    if post_norm is not None and product is not None and rstd is not None:
        place = stacked.make_gradient(len(product))
        gradient = operations.rms_norm_backward(gradient, product, rstd, post_norm, None, place)
    quantize = stacked.quantize_gradients
    return Rows(gradient) if quantize is None else operations.quantize_rows(gradient, quantize)


def _rebuild_norm(
    operations: Operations,
    total: torch.Tensor,
    rstd: torch.Tensor,
    norm: Norm,
    stacked: Stacked,
    buffer: torch.Tensor | None,
) -> torch.Tensor:
    """Return the kept inputs of a matmul, or rebuild them from the stream."""
    if buffer is None:
        buffer = stacked.make_input(len(total))
        operations.rebuild_rms_norm(total, rstd, norm, stacked.inputs_in(buffer))
    return buffer


def _added(ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return the gradient of the stream's second summand, in its dtype."""
    if gradient is None or not ctx.needs_input_grad[1]:
        return None
    return gradient.to(ctx.added)
