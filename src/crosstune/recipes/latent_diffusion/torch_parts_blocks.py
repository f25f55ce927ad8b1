"""Fused blocks of the diffusion transformer for GPUs: the rows of a batch one after the other without padding, hand-written
backward passes, and weights copied into the compute dtype once per step.

The tokens of a row are its text tokens and then its latent tokens. The text stream has a row for each of them; in the rows of
latent tokens it computes zeros that nothing reads, which is less work than moving the tokens apart. The latent stream has the
latent tokens only. The bias of a linear layer gets its gradient from the operation after the layer, which reads the gradient
anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from crosstune.recipes.latent_diffusion import torch_parts_plain
from crosstune.recipes.latent_diffusion.torch_parts_plain import Segments
from crosstune.torch_engine.kernels import decoder
from crosstune.torch_engine.kernels.attention import attends_by_document, prefer_cudnn

_CHUNK = 16
"""Tokens that one program of a kernel computes, all of the same row."""


def pack_rows(lengths: NDArray[Any], latent_tokens: int) -> dict[str, NDArray[Any]]:
    """Return the arrays of `Packed` for texts of these lengths."""
    text, latent = _divide(lengths + latent_tokens), _divide(np.full_like(lengths, latent_tokens))
    places = np.arange(text["bounds"][-1])
    is_latent = places >= np.repeat(text["bounds"][1:], lengths + latent_tokens) - latent_tokens
    is_text = np.arange(lengths.max(initial=1)) < lengths[:, None]
    found: dict[str, NDArray[Any]] = {"text_sources": np.flatnonzero(is_text)}
    found |= {"text_places": np.flatnonzero(~is_latent), "latent_places": np.flatnonzero(is_latent)}
    found["is_latent"] = is_latent.astype(np.uint8)
    found |= {f"text_{name}": array for name, array in text.items()}
    return found | {f"latent_{name}": array for name, array in latent.items()}


def _divide(lengths: NDArray[Any]) -> dict[str, NDArray[np.int32]]:
    """Return the arrays of `Segments`."""
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    counts = -(-lengths // _CHUNK)
    row_chunks = np.concatenate([[0], np.cumsum(counts)])
    rows = np.repeat(np.arange(len(lengths)), counts)
    starts = bounds[rows] + _CHUNK * (np.arange(len(rows)) - row_chunks[rows])
    stops = np.minimum(starts + _CHUNK, bounds[rows + 1])
    arrays = {"bounds": bounds, "starts": starts, "stops": stops, "rows": rows, "row_chunks": row_chunks}
    return {name: array.astype(np.int32) for name, array in arrays.items()}


@dataclass(frozen=True)
class Packed:
    """The rows of a batch without padding."""

    text: Segments
    latent: Segments
    text_sources: torch.Tensor
    """The flat index of each text token in padded rows."""
    text_places: torch.Tensor
    """The place of each text token."""
    latent_places: torch.Tensor
    is_latent: torch.Tensor
    """Per token."""
    longest: int
    """Tokens of the longest row."""

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, torch.Tensor], *, longest: int) -> Packed:
        segments = {
            stream: Segments(
                *(arrays[f"{stream}_{name}"] for name in ("bounds", "starts", "stops", "rows", "row_chunks"))
            )
            for stream in ("text", "latent")
        }
        kept = {name: arrays[name] for name in ("text_sources", "text_places", "latent_places", "is_latent")}
        return cls(**segments, **kept, longest=longest)

    @property
    def num_rows(self) -> int:
        return len(self.text.bounds) - 1

    @property
    def are_equal(self) -> bool:
        return self.num_rows * self.longest == len(self.is_latent)


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
        found: torch.Tensor = torch.mm(gradient.t(), x, out_dtype=torch.float32)
        return found
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


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: Packed, heads: int) -> torch.Tensor:
    """Return the attention of each row over all its tokens."""
    parts = [part.unflatten(1, (heads, -1)) for part in (q, k, v)]
    if packed.are_equal:
        rows = [part.view(packed.num_rows, packed.longest, *part.shape[1:]).transpose(1, 2) for part in parts]
        with prefer_cudnn(q.device):
            found = functional.scaled_dot_product_attention(rows[0], rows[1], rows[2])
        return found.transpose(1, 2).reshape(q.shape)
    if attends_by_document(q.device, q.dtype, None):
        from torch.nn.attention.varlen import varlen_attn

        bounds, longest = packed.text.bounds, packed.longest
        found = varlen_attn(*parts, bounds, bounds, longest, longest)
        return found.reshape(q.shape)
    pieces = zip(
        *(part.transpose(0, 1).split(packed.text.bounds.diff().tolist(), 1) for part in parts), strict=True
    )
    rows = [functional.scaled_dot_product_attention(*(one[None] for one in piece))[0] for piece in pieces]
    return torch.cat(rows, dim=1).transpose(0, 1).reshape(q.shape)


class _CrossEntropy(torch.autograd.Function):
    """The cross entropy of each row. The logits become their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        operations = decoder.choose_operations(logits.device)
        losses, gradient = operations.cross_entropy(
            logits, targets, gradient=ctx.needs_input_grad[0], summed=False
        )
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        (logits,) = ctx.saved_tensors
        return logits.mul_(gradients[0][:, None]), None


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each row, in fp32. The logits are overwritten."""
    losses: torch.Tensor = _CrossEntropy.apply(logits, targets)
    return losses


def choose_operations(device: torch.device) -> Any:
    """Return Triton kernels on a GPU, plain torch otherwise."""
    if device.type != "cuda":
        return torch_parts_plain
    from crosstune.recipes.latent_diffusion import torch_parts_triton

    return torch_parts_triton
