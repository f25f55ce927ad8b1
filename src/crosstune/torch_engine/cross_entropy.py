"""Cross entropy in fp32, a part of the logits at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

LOGITS_AT_A_TIME = 2**24
"""fp32 copies of more logits than this are made in parts; fewer are cheaper at once."""


def cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the summed cross entropy of rows of logits, in fp32."""
    if logits.numel() <= LOGITS_AT_A_TIME:
        return F.cross_entropy(logits.float(), targets, reduction="sum")
    total: torch.Tensor = _InParts.apply(logits, targets, max(1, LOGITS_AT_A_TIME // logits.shape[-1]))
    return total


class _InParts(torch.autograd.Function):
    """Computes the gradient with the loss: beside the logits only one tensor of their size and dtype is kept, instead of
    the logits, their log-softmax and its gradient in fp32."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, rows: int) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        wanted = ctx.needs_input_grad[0]
        gradient = torch.empty_like(logits) if wanted else None
        with torch.autocast(logits.device.type, enabled=False):
            for start in range(0, logits.shape[0], rows):
                part = slice(start, start + rows)
                log_probs = F.log_softmax(logits[part].float(), dim=-1)
                total += F.nll_loss(log_probs, targets[part], reduction="sum")
                if gradient is not None:
                    slope = log_probs.exp_()
                    slope.scatter_add_(1, targets[part][:, None], slope.new_full((len(slope), 1), -1.0))
                    gradient[part] = slope
        ctx.save_for_backward(*([gradient] if gradient is not None else []))
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        [gradient] = ctx.saved_tensors
        return gradient * upstream[0].to(gradient.dtype), None, None
