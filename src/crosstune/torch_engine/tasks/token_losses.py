"""Compute the cross entropy of tokens in chunks: of given logits, or of a model whose logits never exist for a whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from crosstune.estimate.memory import LOGITS_AT_A_TIME


def cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the summed cross entropy of rows of logits, in fp32."""
    if logits.numel() <= LOGITS_AT_A_TIME:
        return F.cross_entropy(logits.float(), targets, reduction="sum")
    total: torch.Tensor = _Chunked.apply(logits, targets, max(1, LOGITS_AT_A_TIME // logits.shape[-1]))
    return total


class _Chunked(torch.autograd.Function):
    """Compute the gradient with the loss: one extra tensor like the logits, instead of fp32 logits, their log-softmax and
    its gradient."""

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


def model_token_losses(
    model: Any,
    options: Mapping[str, Any],
    *,
    select: Callable[[torch.Tensor], torch.Tensor],
    targets: torch.Tensor,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross entropy of each token of `targets`, and its entropy without a gradient, in fp32, of the logits divided by
    the temperature.

    `select` picks the rows of the targets from the head's input, rows x length x channels. In the model's forward pass, the
    head computes these losses instead of logits: it repeats the model's code around the head (scales, caps) for a chunk of
    rows at a time, and again in the backward pass.
    """
    head, body = model.get_output_embeddings(), model.base_model
    if head is None or body is model:
        return _of_logits(select(model(**options).logits).float() / temperature, targets)
    losses, entropies = list[torch.Tensor](), list[torch.Tensor]()
    kinds, project, width = list[Any](), head.forward, 0

    def logits_of(part: torch.Tensor) -> torch.Tensor:
        ids = torch.zeros((1, len(part)), dtype=torch.int64, device=part.device)
        with (
            _replaced_forward(body, lambda *_, **__: kinds[0](last_hidden_state=part[None])),
            _replaced_forward(head, lambda _: project(part[None])),
        ):
            found: torch.Tensor = model.forward(input_ids=ids, use_cache=False).logits[0]
        return found

    def measure(part: torch.Tensor, wanted: torch.Tensor, number: int) -> torch.Tensor:
        nonlocal width
        logits = logits_of(part)
        width = logits.shape[-1]
        if temperature != 1:
            logits = logits.float() / temperature
        if number == len(entropies):  # not again in the backward pass
            entropies.append(_entropy(logits))
        return F.cross_entropy(logits.float(), wanted, reduction="none")

    def run_head(hidden: torch.Tensor) -> torch.Tensor:
        rows = select(hidden)
        size = max(1, LOGITS_AT_A_TIME // model.config.get_text_config().vocab_size)
        for number, (part, wanted) in enumerate(zip(rows.split(size), targets.split(size), strict=True)):
            if len(rows) <= size:
                losses.append(measure(part, wanted, number))
            else:
                losses.append(checkpoint(measure, part, wanted, number, use_reentrant=False))
        return torch.cat(losses).sum().expand(1, 1, width)

    handle = body.register_forward_hook(lambda module, given, output: kinds.append(type(output)))
    try:
        with _replaced_forward(head, run_head):
            output = model(**options).logits
    finally:
        handle.remove()
    if not losses:  # the model does not call its head as a module
        return _of_logits(select(output).float() / temperature, targets)
    # The losses depend on the model's output, so that hooks on it run before the head is computed again.
    return torch.cat(losses) + 0.0 * output.sum(), torch.cat(entropies)


def _of_logits(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    parts = logits.detach().split(max(1, LOGITS_AT_A_TIME // logits.shape[-1]))
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    return losses, torch.cat([_entropy(part) for part in parts])


@torch.no_grad()
def _entropy(logits: torch.Tensor) -> torch.Tensor:
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    return -(log_probs.exp() * log_probs).sum(dim=-1)


@contextlib.contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward method within the context; its hooks still run."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
