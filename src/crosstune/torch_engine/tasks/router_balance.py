"""The loss that spreads tokens over the experts of a mixture, as transformers computes it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from crosstune.core.errors import UserError


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
