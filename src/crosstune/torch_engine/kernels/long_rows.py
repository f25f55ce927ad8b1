"""Save memory of recomputed layers in long rows: the MLP in tiles of tokens, and attention that is not computed twice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from crosstune.torch_engine.kernels.halves import MLPHalf, Pass, Recomputing, Stream, run_mlp


def run_tiled_mlp(stream: Stream, half: MLPHalf, given: Pass, *, tile: int) -> Stream:
    """Apply the MLP to `tile` tokens at a time. Only the residual stream is kept; the backward pass recomputes each tile."""
    parameters = (*half.gate_up.parameters, *half.down.parameters)
    total, added = _TiledMLP.apply(*stream, half, given, tile, *parameters)
    return total, added


class _TiledMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        stream: torch.Tensor,
        added: torch.Tensor,
        half: MLPHalf,
        given: Pass,
        tile: int,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = (stream + added).to(stream.dtype)
        ctx.half, ctx.given, ctx.tile, ctx.added = half, given, tile, added.dtype
        ctx.save_for_backward(total)
        width = half.down.weights.num_outputs
        if given.recomputing.on:
            return total, added.new_empty(()).expand(len(total), width)  # nothing reads it
        out = torch.empty(len(total), width, dtype=half.down.dtype, device=total.device)
        for rows in _tiles(len(total), tile):
            out[rows] = run_mlp((total[rows], None), half, given, keep=False)[1]
        return total, out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        half, given = ctx.half, ctx.given
        [total] = ctx.saved_tensors
        residual, gradient = gradients
        parameters = [*half.gate_up.parameters, *half.down.parameters]
        needed = [total, *parameters] if any(ctx.needs_input_grad[:2]) else parameters
        place = given.make_gradient(total)
        sums: list[torch.Tensor] = []
        for rows in _tiles(len(total), ctx.tile):
            with torch.enable_grad():
                part = total[rows].detach().requires_grad_(needed is not parameters)
                both = run_mlp((part, None), half, given, keep=False)
            # In a matrix with room, the last matmul also computes the gradient of x A.
            of_out = half.down.make_gradient(len(part)).copy_(gradient[rows])
            inputs = [part, *needed[1:]] if needed is not parameters else parameters
            found = list(torch.autograd.grad(both, inputs, (residual[rows], of_out)))
            if needed is not parameters:
                place[rows] = found.pop(0)
            sums = [a.add_(b) for a, b in zip(sums, found, strict=True)] if sums else found
        stream = place if needed is not parameters else None
        return stream, stream.to(ctx.added) if stream is not None else None, None, None, None, *sums


def _tiles(count: int, tile: int) -> Iterator[slice]:
    return (slice(start, min(start + tile, count)) for start in range(0, count, tile))


class KeptAttention:
    """Keep the outputs of the attention of a recomputed layer, so that the recomputation need not compute them again."""

    def __init__(self) -> None:
        self._outputs: list[Any] = []
        self._held: list[torch.Tensor] = []

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        """Keep outputs in the `with` block."""
        return _Watching(self._outputs)

    def hold(self) -> None:
        """Save the kept tensors for the backward pass as autograd does, so that they can be moved to the host."""
        for number, output in enumerate(self._outputs):
            values, *rest = output
            self._held.append(_Held.apply(values.detach().requires_grad_()))
            self._outputs[number] = rest

    def replaying(self, recomputing: Recomputing) -> contextlib.AbstractContextManager[Any]:
        """Return the kept outputs in the `with` block, a recomputation, instead of computing them."""
        return _Replaying(self, recomputing)

    def output(self, number: int) -> tuple[Any, ...]:
        grad_fn: Any = self._held[number].grad_fn
        [values] = grad_fn.saved_tensors
        return values.detach(), *self._outputs[number]


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(values)
        return values.new_empty(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        raise AssertionError("only a place for a tensor")


def _is_attention(func: Any) -> bool:
    name = func._schema.name
    return name.startswith("aten::_scaled_dot_product") and not name.endswith("_backward")


class _Watching(TorchDispatchMode):
    def __init__(self, outputs: list[Any]) -> None:
        super().__init__()
        self._outputs = outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _is_attention(func):
            self._outputs.append(tuple(out))
        return out


class _Replaying(TorchDispatchMode):
    """Entered for each backward pass through the same graph."""

    def __init__(self, kept: KeptAttention, recomputing: Recomputing) -> None:
        super().__init__()
        self._kept, self._recomputing = kept, recomputing

    def __enter__(self) -> Any:
        self._number = 0
        self._recomputing.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._recomputing.__exit__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_attention(func):
            return func(*args, **(kwargs or {}))
        self._number += 1
        return self._kept.output(self._number - 1)
