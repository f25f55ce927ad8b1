"""Cross entropy in fp32, computed over chunks of the logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from crosstune.core.memory import LOGITS_AT_A_TIME


def cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the summed cross entropy of rows of logits, in fp32."""
    if logits.numel() <= LOGITS_AT_A_TIME:
        return F.cross_entropy(logits.float(), targets, reduction="sum")
    total: torch.Tensor = _Chunked.apply(logits, targets, max(1, LOGITS_AT_A_TIME // logits.shape[-1]))
    return total


class _Chunked(torch.autograd.Function):
    """Compute the gradient together with the loss, which keeps one extra tensor of the logits' size and dtype instead of
    the fp32 logits, their log-softmax and its gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, rows: int) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        with torch.autocast(logits.device.type, enabled=False):
            for start in range(0, logits.shape[0], rows):
                chunk = slice(start, start + rows)
                log_probs = F.log_softmax(logits[chunk].float(), dim=-1)
                total += F.nll_loss(log_probs, targets[chunk], reduction="sum")
                if gradient is not None:
                    probs = log_probs.exp_()
                    probs.scatter_add_(1, targets[chunk][:, None], probs.new_full((len(probs), 1), -1.0))
                    gradient[chunk] = probs
        ctx.save_for_backward(*([gradient] if gradient is not None else []))
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        [gradient] = ctx.saved_tensors
        return gradient * upstream[0].to(gradient.dtype), None, None
