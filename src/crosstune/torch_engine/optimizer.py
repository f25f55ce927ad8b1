"""Optimizers over fp32 masters of what is trained."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

BETAS = (0.9, 0.999)
EPSILON = 1e-8


class Masters:
    """What the optimizer moves. A parameter in fp32 is its own master; a shorter one has a copy in fp32."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        self.masters: dict[str, torch.Tensor] = {
            name: p if p.dtype == torch.float32 else p.detach().float().requires_grad_()
            for name, p in self.parameters.items()
        }

    def collect_gradients(self) -> None:
        """Add the gradients of one backward pass to the masters', in fp32."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is parameter or parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    def publish(self) -> None:
        """Write the masters back into the model."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if self.masters[name] is not parameter:
                    parameter.copy_(self.masters[name])

    def clear_gradients(self) -> None:
        for tensor in (*self.parameters.values(), *self.masters.values()):
            tensor.grad = None


def make_optimizer(
    name: str, masters: Mapping[str, torch.Tensor], *, weight_decay: float
) -> torch.optim.Optimizer:
    """Decay goes to matrices only: biases and the gains of norms are not pulled to zero."""
    groups = [
        {"params": [m for m in masters.values() if m.ndim >= 2], "weight_decay": weight_decay},
        {"params": [m for m in masters.values() if m.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    fused = True if name.startswith("fused_") else None
    kind = name.removeprefix("fused_")
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPSILON, fused=fused)
    if kind == "adam":
        return torch.optim.Adam(groups, lr=0.0, betas=BETAS, eps=EPSILON, fused=fused)
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=0.0)
    if kind == "adadelta":
        return torch.optim.Adadelta(groups, lr=0.0)
    raise AssertionError(f"no optimizer {name}")
