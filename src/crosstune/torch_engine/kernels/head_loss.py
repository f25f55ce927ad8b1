"""Compute the cross entropy over a frozen output head in chunks of tokens, with the gradient in the same pass."""

from __future__ import annotations

from typing import Any

import torch

from crosstune.estimate.fast_layers import rows_at_a_time
from crosstune.torch_engine.kernels.operations import Operations


def head_loss(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, operations: Operations
) -> torch.Tensor:
    """Return the summed cross entropy of `hidden @ weight.T`, in fp32. The head gets no gradient."""
    total: torch.Tensor = _HeadLoss.apply(hidden, weight, targets, operations)
    return total


def head_errors(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, operations: Operations
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss without gradients, and which targets do not have the largest logit."""
    total, wrong = _zero(hidden), torch.empty_like(targets, dtype=torch.bool)
    for chunk in _chunks(hidden, weight):
        logits = hidden[chunk].to(weight.dtype) @ weight.t()
        wrong[chunk] = logits.argmax(dim=-1) != targets[chunk]
        total += operations.cross_entropy(logits, targets[chunk], gradient=False)[0]
    return total, wrong


def head_token_losses(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, operations: Operations
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross entropy of each token, and the entropy of its distribution without a gradient, in fp32."""
    losses, entropies = _TokenLosses.apply(hidden, weight, targets, operations)
    return losses, entropies


class _TokenLosses(torch.autograd.Function):
    """Like `_HeadLoss` for each token: its gradient is the kept row times one number."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        operations: Operations,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        losses, entropies = (_zero(hidden).expand(len(hidden)).clone() for _ in range(2))
        needed = ctx.needs_input_grad[0]
        gradient = torch.empty_like(hidden) if needed else None
        for chunk in _chunks(hidden, weight):
            logits = hidden[chunk].to(weight.dtype) @ weight.t()
            log_probs = torch.log_softmax(logits.to(losses.dtype), dim=-1)
            entropies[chunk] = -(log_probs.exp() * log_probs).sum(dim=-1)
            del log_probs
            losses[chunk], probs = operations.cross_entropy(
                logits, targets[chunk], gradient=needed, summed=False
            )
            if gradient is not None and probs is not None:
                gradient[chunk] = probs @ weight
        ctx.save_for_backward(*([gradient] if gradient is not None else []))
        ctx.mark_non_differentiable(entropies)
        return losses, entropies

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        [gradient] = ctx.saved_tensors
        return gradient * upstream[0].to(gradient.dtype)[:, None], None, None, None


class _HeadLoss(torch.autograd.Function):
    """Compute logits one chunk at a time; keep only the gradient of the hidden states."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        operations: Operations,
    ) -> torch.Tensor:
        total, needed = _zero(hidden), ctx.needs_input_grad[0]
        gradient = torch.empty_like(hidden) if needed else None
        for chunk in _chunks(hidden, weight):
            logits = hidden[chunk].to(weight.dtype) @ weight.t()
            loss, probs = operations.cross_entropy(logits, targets[chunk], gradient=needed)
            total += loss
            if gradient is not None and probs is not None:
                gradient[chunk] = probs @ weight
        ctx.save_for_backward(*([gradient] if gradient is not None else []))
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        [gradient] = ctx.saved_tensors
        return gradient * upstream[0].to(gradient.dtype), None, None, None


def _zero(hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)


def _chunks(hidden: torch.Tensor, weight: torch.Tensor) -> list[slice]:
    size = rows_at_a_time(weight.shape[0], on_gpu=hidden.device.type != "cpu")
    return [slice(start, start + size) for start in range(0, len(hidden), size)]
