"""Compute the cross entropy or another loss over a frozen output head in chunks of tokens, with the gradient in the same pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from crosstune.estimate.fast_layers import rows_at_a_time
from crosstune.torch_engine.kernels.operations import Operations


def head_loss(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, operations: Operations
) -> torch.Tensor:
    """Return the summed cross entropy of `hidden @ weight.T`, in fp32. The head gets no gradient."""
    total: torch.Tensor = _HeadLoss.apply(hidden, weight, targets, operations, None)
    return total


def head_token_losses(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, operations: Operations
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross entropy of each token, and the entropy of its distribution without a gradient, in fp32."""
    entropies = _zero(hidden, len(hidden))
    losses: torch.Tensor = _HeadLoss.apply(hidden, weight, targets, operations, entropies)
    return losses, entropies


def head_errors(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, operations: Operations
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss without gradients, and which targets do not have the largest logit."""
    total, wrong = _zero(hidden), torch.empty_like(targets, dtype=torch.bool)
    for chunk, logits in _each_logits(hidden, weight):
        wrong[chunk] = logits.argmax(dim=-1) != targets[chunk]
        total += operations.cross_entropy(logits, targets[chunk], gradient=False)[0]
    return total, wrong


Measure = Callable[[torch.Tensor, slice], torch.Tensor]
"""(logits of some rows, which rows) -> a value or a vector for each row."""


def measure_head(
    hidden: torch.Tensor, weight: torch.Tensor, loss_of: Measure, values_of: Measure
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each row of logits, and values without a gradient, in fp32. A row's loss depends on its logits only."""
    values: list[torch.Tensor] = []
    losses: torch.Tensor = _HeadMeasure.apply(hidden, weight, loss_of, values_of, values)
    return losses, torch.cat(values)


class _HeadMeasure(torch.autograd.Function):
    """Like `_HeadLoss` for any loss: autograd differentiates one chunk of logits at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        loss_of: Measure,
        values_of: Measure,
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        needed = ctx.needs_input_grad[0]
        losses = _zero(hidden, len(hidden))
        gradient = torch.empty_like(hidden) if needed else None
        for chunk in _chunks(hidden, weight) or [slice(0, 0)]:
            logits = hidden[chunk].to(weight.dtype) @ weight.t()
            values.append(values_of(logits, chunk))
            with torch.set_grad_enabled(needed):
                found = loss_of(logits.requires_grad_(needed), chunk)
            losses[chunk] = found.detach()
            if gradient is not None:
                [by_logits] = torch.autograd.grad(found, logits, torch.ones_like(found))
                gradient[chunk] = by_logits @ weight
        ctx.save_for_backward(*([gradient] if gradient is not None else []))
        return losses

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None]:
        [gradient] = ctx.saved_tensors
        return gradient * upstream[0].to(gradient.dtype)[..., None], None, None, None, None


class _HeadLoss(torch.autograd.Function):
    """Compute logits one chunk at a time; keep only the gradient of the hidden states. The gradient of a token's loss is the
    kept row times one number."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        operations: Operations,
        entropies: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the summed loss; or the loss of each token, and fill in `entropies`."""
        summed, needed = entropies is None, ctx.needs_input_grad[0]
        losses = _zero(hidden) if summed else _zero(hidden, len(hidden))
        gradient = torch.empty_like(hidden) if needed else None
        for chunk, logits in _each_logits(hidden, weight):
            if entropies is not None:
                log_probs = torch.log_softmax(logits.to(losses.dtype), dim=-1)
                entropies[chunk] = -(log_probs.exp() * log_probs).sum(dim=-1)
                del log_probs
            loss, probs = operations.cross_entropy(logits, targets[chunk], gradient=needed, summed=summed)
            (losses if summed else losses[chunk]).add_(loss)
            if gradient is not None and probs is not None:
                gradient[chunk] = probs @ weight
        ctx.save_for_backward(*([gradient] if gradient is not None else []))
        return losses

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None]:
        [gradient] = ctx.saved_tensors
        return gradient * upstream[0].to(gradient.dtype)[..., None], None, None, None, None


def _zero(hidden: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)


def _each_logits(hidden: torch.Tensor, weight: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield each chunk with its logits, without a gradient. A CPU reuses their memory: new pages take time, and more of it on
    a busy machine."""
    buffer = None
    for chunk in _chunks(hidden, weight):
        part = hidden[chunk].detach().to(weight.dtype)
        if hidden.device.type != "cpu":
            yield chunk, part @ weight.t()
            continue
        if buffer is None:
            buffer = weight.new_empty(len(part), len(weight))
        yield chunk, torch.mm(part, weight.t(), out=buffer[: len(part)])


def _chunks(hidden: torch.Tensor, weight: torch.Tensor) -> list[slice]:
    size = rows_at_a_time(weight.shape[0], on_gpu=hidden.device.type != "cpu")
    return [slice(start, start + size) for start in range(0, len(hidden), size)]
