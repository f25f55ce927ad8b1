"""Losses of tokens: the cross entropy of logits or of a model in chunks, so that the logits of a batch need not exist at once, and the
balance loss of a mixture of experts."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from crosstune.core.errors import UserError
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


Place = slice
"""Some of the rows that reach the head."""
Measure = Callable[[torch.Tensor, Place], torch.Tensor]
"""(logits of some rows, which rows) -> a value or a vector for each row."""


def model_token_losses(
    model: Any,
    options: Mapping[str, Any],
    *,
    select: Callable[[torch.Tensor], torch.Tensor],
    targets: torch.Tensor,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross entropy of each token of `targets`, and its entropy without a gradient, in fp32, of the logits divided by
    the temperature."""

    def scaled(logits: torch.Tensor) -> torch.Tensor:
        return logits if temperature == 1 else logits.float() / temperature

    def loss_of(logits: torch.Tensor, place: Place) -> torch.Tensor:
        return F.cross_entropy(scaled(logits).float(), targets[place], reduction="none")

    def entropy_of(logits: torch.Tensor, _: Place) -> torch.Tensor:
        return _entropy(scaled(logits))

    return measure_model(model, options, select=select, loss_of=loss_of, values_of=entropy_of)


def measure_model(
    model: Any,
    options: Mapping[str, Any],
    *,
    select: Callable[[torch.Tensor], torch.Tensor],
    loss_of: Measure,
    values_of: Measure,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each row of logits, and values without a gradient, in fp32.

    `select` picks the rows from the head's input, rows x length x channels. In the model's forward pass, the head computes these
    losses instead of logits: it repeats the model's code around the head (scales, caps) for a chunk of rows at a time, and again
    in the backward pass.
    """
    split = _SplitModel(model)
    losses, values = list[torch.Tensor](), list[torch.Tensor]()
    width = 0

    def measure(part: torch.Tensor, place: Place) -> torch.Tensor:
        nonlocal width
        logits = split.logits(part)
        width = logits.shape[-1]
        if place.start >= sum(map(len, values)):  # not again in the backward pass
            with torch.no_grad():
                values.append(values_of(logits, place))
        return loss_of(logits, place)

    def run_head(hidden: torch.Tensor) -> torch.Tensor:
        rows = select(hidden)
        places = _places(len(rows), model)
        for place in places:
            part = rows[place]
            if len(places) == 1:
                losses.append(measure(part, place))
            else:
                losses.append(checkpoint(measure, part, place, use_reentrant=False))
        return torch.cat(losses).sum().expand(1, 1, width)

    output = split.run(options, run_head)
    if not losses:  # the model does not call its head as a module
        rows = select(output)
        parts = [(rows[place], place) for place in _places(len(rows), model)]
        with torch.no_grad():
            values = [values_of(*part) for part in parts]
        return torch.cat([loss_of(*part) for part in parts]), torch.cat(values)
    # The losses depend on the model's output, so that hooks on it run before the head is computed again.
    return torch.cat(losses) + 0.0 * output.sum(), torch.cat(values)


@torch.no_grad()
def head_inputs(
    model: Any, options: Mapping[str, Any], *, select: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the selected rows of the head's input, and a function that computes the logits of some of them."""
    split, found = _SplitModel(model), list[torch.Tensor]()

    def run_head(hidden: torch.Tensor) -> torch.Tensor:
        found.append(select(hidden))
        return hidden[:1, :1]

    output = split.run(options, run_head)
    if not found:
        return select(output), lambda part: part
    return found[0], torch.no_grad()(split.logits)


class _SplitModel:
    """A model whose head is computed for other rows than the model's, with the model's code around it."""

    def __init__(self, model: Any) -> None:
        self.model, self.body, self.head = model, model.base_model, model.get_output_embeddings()
        self._project = self.head.forward if self.head is not None else None
        self._kind: Any = None
        """The type of the body's output."""

    def run(
        self, options: Mapping[str, Any], run_head: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return the model's output with `run_head` in place of the head."""
        if self.head is None or self.body is self.model:
            logits: torch.Tensor = self.model(**options).logits
            return logits

        def note(module: nn.Module, given: Any, output: Any) -> None:
            self._kind = type(output)

        handle = self.body.register_forward_hook(note)
        try:
            with _replaced_forward(self.head, run_head):
                found: torch.Tensor = self.model(**options).logits
        finally:
            handle.remove()
        return found

    def logits(self, part: torch.Tensor) -> torch.Tensor:
        """Return the logits of rows of the head's input."""
        ids = torch.zeros((1, len(part)), dtype=torch.int64, device=part.device)
        with (
            _replaced_forward(self.body, lambda *_, **__: self._kind(last_hidden_state=part[None])),
            _replaced_forward(self.head, lambda _: self._project(part[None])),  # type: ignore[misc]
        ):
            found: torch.Tensor = self.model.forward(input_ids=ids, use_cache=False).logits[0]
        return found


def _places(count: int, model: Any) -> list[Place]:
    """Divide the rows of logits into chunks."""
    size = max(1, LOGITS_AT_A_TIME // model.config.get_text_config().vocab_size)
    return [slice(start, start + size) for start in range(0, max(1, count), size)]


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


def check_router_balance(model: nn.Module) -> None:
    """Raise if a model does not return the logits of its routers."""
    if "output_router_logits" not in inspect.signature(model.forward).parameters:
        raise UserError(
            f"--router_aux_loss_coef does not apply to {type(model).__name__}.",
            why="transformers defines no balance loss for it: it has no experts, or balances them by a bias.",
            do="remove --router_aux_loss_coef",
        )


def router_balance(model: Any, router_logits: Any, real: torch.Tensor | None) -> torch.Tensor:
    """Return the balance loss: the number of experts times the sum, over the experts, of an expert's share of the choices
    times its mean probability. It equals the number of experts per token if all are chosen equally often. `real` marks the
    tokens that are not padding."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    found: torch.Tensor = load_balancing_loss_func(
        router_logits, model.num_experts, model.num_experts_per_tok, real
    )
    return found
