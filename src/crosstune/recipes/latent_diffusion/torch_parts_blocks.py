"""Fused blocks of the diffusion transformer for GPUs, with hand-written backward passes, on rows without padding. Weights are
copied into the compute dtype once per step.

A row consists of its text tokens and then its latent tokens. The text stream has rows for both: computing unused zeros for
latent tokens takes less time than moving the tokens apart. The latent stream has the latent tokens only. The bias of a linear
layer gets its gradient from the operation after the layer, which reads the gradient anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from crosstune.recipes.latent_diffusion import torch_parts_plain
from crosstune.recipes.latent_diffusion.torch_parts_packed import Packed, attend
from crosstune.recipes.latent_diffusion.torch_parts_plain import Segments


@dataclass(frozen=True)
class Layer:
    """A linear layer: its parameters, and their copies in the compute dtype."""

    weight: torch.Tensor
    bias: torch.Tensor
    weight_copy: torch.Tensor
    bias_copy: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias_copy, x, self.weight_copy.t())

    def weight_gradient(self, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        return product_of_rows(gradient, x) if self.weight.requires_grad else None


def product_of_rows(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return gradient^T x in fp32."""
    if gradient.device.type == "cuda" and gradient.dtype.itemsize == 2:
        return torch.mm(gradient.t(), x, out_dtype=torch.float32)
    return (gradient.t() @ x).float()


class Copies:
    """The linear layers of the blocks in the compute dtype, copied again after each update."""

    def __init__(self, linears: Sequence[nn.Linear], dtype: torch.dtype) -> None:
        self._sources: list[torch.Tensor] = [p.detach() for one in linears for p in (one.weight, one.bias)]
        self._parameters = [p for one in linears for p in (one.weight, one.bias)]
        rows = sum(len(one.weight) for one in linears)
        is_stacked = len({one.in_features for one in linears}) == 1
        device = self._sources[0].device
        self.matrix = (
            torch.empty(rows, linears[0].in_features, dtype=dtype, device=device) if is_stacked else None
        )
        self.vector = torch.empty(rows, dtype=dtype, device=device)
        self.layers: list[Layer] = []
        start = 0
        for one in linears:
            part = slice(start, start := start + len(one.weight))
            if self.matrix is not None:
                weight = self.matrix[part]
            else:
                weight = torch.empty_like(one.weight, dtype=dtype).detach()
            self.layers.append(Layer(one.weight, one.bias, weight, self.vector[part]))
        self._targets = [copy for one in self.layers for copy in (one.weight_copy, one.bias_copy)]
        self._versions: list[int] = []

    @torch.no_grad()
    def refresh(self) -> None:
        versions = [parameter._version for parameter in self._parameters]
        if versions != self._versions:
            torch._foreach_copy_(self._targets, self._sources)
            self._versions = versions


class _Modulations(torch.autograd.Function):
    """The shifts, scales and gates of all blocks, from the embedding of the times, in one matmul."""

    @staticmethod
    def forward(ctx: Any, cond: torch.Tensor, copies: Copies, *parameters: torch.Tensor) -> torch.Tensor:
        assert copies.matrix is not None
        ctx.copies = copies
        ctx.save_for_backward(cond)
        return torch.addmm(copies.vector, cond, copies.matrix.t())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        (cond,) = ctx.saved_tensors
        gradient, copies = gradients[0], ctx.copies
        weights = product_of_rows(gradient, cond)
        biases = gradient.sum(0, dtype=torch.float32)
        found: list[torch.Tensor | None] = []
        start = 0
        for one in copies.layers:
            part = slice(start, start := start + len(one.weight))
            found += [weights[part], biases[part]] if one.weight.requires_grad else [None, None]
        return gradient @ copies.matrix, None, *found


class _Modulate(torch.autograd.Function):
    """Add the gated output of the last layer to a stream; normalize, scale and shift the sum. `bias` is that layer's."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        branch: torch.Tensor | None,
        bias: torch.Tensor | None,
        gate: torch.Tensor | None,
        shift: torch.Tensor,
        scale: torch.Tensor,
        segments: Segments,
        operations: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, out, mean, rstd = operations.modulate(x, branch, gate, shift, scale, segments)
        ctx.set_materialize_grads(False)
        ctx.segments, ctx.operations = segments, operations
        ctx.save_for_backward(total, mean, rstd, scale, branch, gate)
        return total, out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        total, mean, rstd, scale, branch, gate = ctx.saved_tensors
        residual, gradient = gradients
        if gradient is None:  # nothing read the modulated rows
            gradient = torch.zeros_like(total)
        x, for_branch, sums = ctx.operations.modulate_backward(
            gradient, total, mean, rstd, scale, residual, branch, gate, ctx.segments
        )
        shift, scale, opened, bias = sums.unbind(1)
        per_row = (shift.to(total.dtype), scale.to(total.dtype))
        if branch is None:
            return x, None, None, None, *per_row, None, None
        bias = bias.sum(0) if ctx.needs_input_grad[2] else None
        return x, for_branch, bias, opened.to(total.dtype), *per_row, None, None


class _Project(torch.autograd.Function):
    """Return the queries, keys and values of all tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        text: torch.Tensor,
        latent: torch.Tensor,
        block: FusedBlock,
        packed: Packed,
        operations: Any,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        qkv = block.text.qkv(text)
        qkv.index_copy_(0, packed.latent_places, block.latent.qkv(latent))
        norms = (block.text.q_norm, block.text.k_norm, block.latent.q_norm, block.latent.k_norm)
        q, k = operations.normalize_heads(qkv, norms, packed.is_latent, block.heads)
        ctx.block, ctx.packed, ctx.operations = block, packed, operations
        ctx.save_for_backward(text, latent, qkv, *norms)
        return q, k, qkv[:, 2 * q.shape[1] :]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        text, latent, qkv, *norms = ctx.saved_tensors
        block, packed = ctx.block, ctx.packed
        found, of_norms, of_bias = ctx.operations.normalize_heads_backward(
            *gradients, qkv, tuple(norms), packed.is_latent, block.heads
        )
        of_latent = found.index_select(0, packed.latent_places)
        found.index_fill_(0, packed.latent_places, 0.0)
        return (
            found @ block.text.qkv.weight_copy,
            of_latent @ block.latent.qkv.weight_copy,
            None,
            None,
            None,
            block.text.qkv.weight_gradient(found, text),
            of_bias,
            block.latent.qkv.weight_gradient(of_latent, latent),
            of_latent.sum(0, dtype=torch.float32),
            *of_norms.unbind(0),
        )


class _Output(torch.autograd.Function):
    """Return the output of attention for the text, or for the latent: the rows at `places`."""

    @staticmethod
    def forward(
        ctx: Any, attended: torch.Tensor, block: FusedBlock, packed: Packed, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        latent = attended.index_select(0, packed.latent_places)
        ctx.set_materialize_grads(False)
        ctx.block, ctx.packed = block, packed
        ctx.save_for_backward(attended, latent)
        return block.text.out(attended), block.latent.out(latent)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        attended, latent = ctx.saved_tensors
        block, places = ctx.block, ctx.packed.latent_places
        of_text, of_latent = gradients
        weights: list[torch.Tensor | None] = [None, None]
        if of_text is None:
            found = torch.zeros_like(attended)
        else:
            found = of_text @ block.text.out.weight_copy
            weights[0] = block.text.out.weight_gradient(of_text, attended)
        if of_latent is not None:  # the text's gradient of these rows is zero
            found.index_copy_(0, places, of_latent @ block.latent.out.weight_copy)
            weights[1] = block.latent.out.weight_gradient(of_latent, latent)
        return found, None, None, *weights


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, up: Layer, down: Layer, operations: Any, *parameters: torch.Tensor
    ) -> torch.Tensor:
        before = up(x)
        ctx.up, ctx.down, ctx.operations = up, down, operations
        ctx.save_for_backward(x, before)
        return down(operations.gelu(before))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        x, before = ctx.saved_tensors
        up, down = ctx.up, ctx.down
        active, found, bias = ctx.operations.gelu_backward(gradients[0] @ down.weight_copy, before)
        of_down = down.weight_gradient(gradients[0], active)
        of_up = up.weight_gradient(found, x)
        return (
            found @ up.weight_copy,
            None,
            None,
            None,
            of_up,
            bias if up.bias.requires_grad else None,
            of_down,
        )


@dataclass(frozen=True)
class FusedStream:
    """The layers of one modality in a block."""

    qkv: Layer
    out: Layer
    up: Layer
    down: Layer
    q_norm: torch.Tensor
    k_norm: torch.Tensor


@dataclass(frozen=True)
class FusedBlock:
    text: FusedStream
    latent: FusedStream
    heads: int


@dataclass
class Pending:
    """A stream, and the output of its last layer that is not yet added."""

    x: torch.Tensor
    branch: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    gate: torch.Tensor | None = None

    def modulate(
        self, shift: torch.Tensor, scale: torch.Tensor, segments: Segments, operations: Any
    ) -> torch.Tensor:
        """Add the pending output, and return the modulated sum."""
        self.x, out = _Modulate.apply(
            self.x, self.branch, self.bias, self.gate, shift, scale, segments, operations
        )
        self.branch = self.bias = self.gate = None
        return out


class FusedBlocks:
    """All blocks of a model, with the modulations after them. They share its parameters."""

    def __init__(self, model: Any, *, operations: Any = None) -> None:
        self.operations = (
            choose_operations(model.token_embedding.weight.device) if operations is None else operations
        )
        blocks = list(model.blocks)
        streams = [stream for block in blocks for stream in (block.text, block.latent)]
        linears = [one for stream in streams for one in (stream.qkv, stream.out, stream.up, stream.down)]
        modulating = [stream.modulation for stream in streams]
        self.copies = Copies(linears, model.compute_dtype)
        self.modulating = Copies(
            [*modulating, model.text_modulation, model.latent_modulation], model.compute_dtype
        )
        layers = self.copies.layers
        fused = [
            FusedStream(
                qkv=layers[4 * index],
                out=layers[4 * index + 1],
                up=layers[4 * index + 2],
                down=layers[4 * index + 3],
                q_norm=stream.q_norm,
                k_norm=stream.k_norm,
            )
            for index, stream in enumerate(streams)
        ]
        self.blocks = [
            FusedBlock(text, latent, block.text.heads)
            for block, text, latent in zip(blocks, fused[::2], fused[1::2], strict=True)
        ]

    def run(
        self,
        text: torch.Tensor,
        latent: torch.Tensor,
        cond: torch.Tensor,
        packed: Packed,
        *,
        keeps_text: bool,
        keeps_latent: bool,
        recomputes: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both streams after the last block and its modulation; a stream that is not kept is not computed to the end.
        `text` has zeros in the rows of latent tokens."""
        self.copies.refresh()
        self.modulating.refresh()
        parameters = [p for one in self.modulating.layers for p in (one.weight, one.bias)]
        everything: torch.Tensor = _Modulations.apply(cond, self.modulating, *parameters)
        parts = everything.unflatten(1, (-1, text.shape[1])).unbind(1)
        now: tuple[torch.Tensor | None, ...] = (text, None, latent, None)
        biases: tuple[torch.Tensor | None, ...] = (None, None)
        for number, block in enumerate(self.blocks):
            is_last = number == len(self.blocks) - 1
            keeps = (keeps_text or not is_last, keeps_latent or not is_last)
            of_block = parts[12 * number : 12 * number + 12]
            gates = (parts[12 * number - 7], parts[12 * number - 1]) if number else (None, None)
            arguments = (block, packed, keeps, *now, *biases, *gates, *of_block)
            if recomputes:
                # Reentrant, with its inputs as a flat list: a third of the calls on the host, which is the slower side here.
                now = checkpoint(self._run, *arguments, use_reentrant=True, preserve_rng_state=False)
            else:
                now = self._run(*arguments)
            biases = (block.text.down.bias, block.latent.down.bias)
        last = 12 * len(self.blocks)
        found = []
        for stream, kept, at in ((0, keeps_text, last - 7), (1, keeps_latent, last - 1)):
            x, branch = now[2 * stream : 2 * stream + 2]
            segments = (packed.text, packed.latent)[stream]
            if kept:
                shift, scale = parts[last + 2 * stream : last + 2 * stream + 2]
                x = Pending(x, branch, biases[stream], parts[at]).modulate(
                    shift, scale, segments, self.operations
                )
            found.append(x)
        return found[0], found[1]

    def _run(
        self,
        block: FusedBlock,
        packed: Packed,
        keeps: tuple[bool, bool],
        *tensors: Any,
    ) -> tuple[Any, ...]:
        """Run a block. A stream is passed on as its sum so far and the output to add; the bias of that output and its gate
        follow in `tensors`, and then the modulations of this block."""
        text, text_branch, latent, latent_branch, *others = tensors
        (text_bias, latent_bias, text_gate, latent_gate), parts = others[:4], others[4:]
        operations = self.operations
        streams = (
            (Pending(text, text_branch, text_bias, text_gate), block.text, packed.text, parts[:6]),
            (
                Pending(latent, latent_branch, latent_bias, latent_gate),
                block.latent,
                packed.latent,
                parts[6:],
            ),
        )
        inputs = [
            pending.modulate(part[0], part[1], segments, operations) for pending, _, segments, part in streams
        ]
        norms = [p for _, stream, _, _ in streams for p in (stream.q_norm, stream.k_norm)]
        of_qkv = [p for _, stream, _, _ in streams for p in (stream.qkv.weight, stream.qkv.bias)]
        q, k, v = _Project.apply(*inputs, block, packed, operations, *of_qkv, *norms)
        attended = attend(q, k, v, packed, block.heads)
        outputs = _Output.apply(attended, block, packed, block.text.out.weight, block.latent.out.weight)
        found: list[Any] = []
        for (pending, stream, segments, part), output, kept in zip(streams, outputs, keeps, strict=True):
            branch = None
            if kept:
                pending.branch, pending.bias, pending.gate = output, stream.out.bias, part[2]
                x = pending.modulate(part[3], part[4], segments, operations)
                parameters = (stream.up.weight, stream.up.bias, stream.down.weight)
                branch = _FeedForward.apply(x, stream.up, stream.down, operations, *parameters)
            found += [pending.x, branch]
        return tuple(found)


def choose_operations(device: torch.device) -> Any:
    """Return Triton kernels on a GPU, plain torch otherwise."""
    if device.type != "cuda":
        return torch_parts_plain
    from crosstune.recipes.latent_diffusion import torch_parts_triton

    return torch_parts_triton
