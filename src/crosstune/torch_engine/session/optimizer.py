"""Optimizers over fp32 master copies of the trained parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from crosstune.config.schema import Config
from crosstune.core.weights import LION_BETAS, SLOT
from crosstune.torch_engine.sharding.local_shard import is_sharded, local_part

Groups = list[dict[str, Any]]


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023): steps of the learning rate in the sign of an averaged gradient, decoupled weight decay."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        now, kept = LION_BETAS
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            for weight in weights:
                if "exp_avg" not in self.state[weight]:
                    self.state[weight]["exp_avg"] = torch.zeros_like(weight)
            gradients = [weight.grad for weight in weights]
            averages = [self.state[weight]["exp_avg"] for weight in weights]
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            signs = torch._foreach_lerp(averages, gradients, 1 - now)
            torch._foreach_sign_(signs)
            torch._foreach_add_(weights, signs, alpha=-group["lr"])
            torch._foreach_lerp_(averages, gradients, 1 - kept)


class Masters:
    """Tensors the optimizer updates. An fp32 parameter is its own master; a 16-bit one has an fp32 copy.

    The master of a sharded parameter is the shard of this rank as a plain tensor: the optimizers used with sharding
    update each element on its own.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        self.masters: dict[str, torch.Tensor] = {name: _master(p) for name, p in self.parameters.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the whole parameters."""
        return {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}

    def collect_gradients(self) -> None:
        """Move the gradients of one backward pass to the masters, summed in fp32."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is parameter or parameter.grad is None:
                continue
            gradient = local_part(parameter.grad).float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    def publish(self) -> None:
        """Copy the masters into the model."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if self.masters[name] is not parameter and parameter.dtype != torch.float32:
                    local_part(parameter).copy_(self.masters[name])

    def clear_gradients(self) -> None:
        for tensor in (*self.parameters.values(), *self.masters.values()):
            tensor.grad = None


def _master(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.dtype != torch.float32:
        return local_part(parameter.detach()).float().requires_grad_()
    # The shard shares memory with the parameter, so an update needs no copy.
    return local_part(parameter.detach()).requires_grad_() if is_sharded(parameter) else parameter


def make_optimizer(masters: Mapping[str, torch.Tensor], config: Config) -> torch.optim.Optimizer:
    """Return the optimizer for a config.

    Weight decay applies to matrices, not to biases and norm weights. --loraplus_lr_ratio scales the learning rate of B
    matrices. With --ema_decay the optimizer's state also contains a moving average of the weights.
    """
    groups: dict[tuple[bool, bool], list[torch.Tensor]] = {}
    for key, master in masters.items():
        groups.setdefault((master.ndim >= 2, key.endswith("lora_B.weight")), []).append(master)
    settings = [
        {
            "params": group,
            "weight_decay": config.wd if matrix else 0.0,
            "lr_ratio": config.loraplus_lr_ratio if is_b else 1.0,
        }
        for (matrix, is_b), group in groups.items()
    ]
    optimizer = _OPTIMIZERS[config.optimizer](settings, **_constants(config))
    if config.ema_decay:
        optimizer.register_step_post_hook(lambda *_: _move_average(optimizer, config.ema_decay))
    return optimizer


@torch.no_grad()
def _move_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Move the average towards the weights; it starts as a copy after the first step."""
    averages, weights = [], []
    for group in optimizer.param_groups:
        for master in group["params"]:
            if master.grad is None and not optimizer.state.get(master):
                continue  # never updated; an average would keep Adam from creating its moments later
            state = optimizer.state[master]  # empty with sgd
            if SLOT not in state:
                state[SLOT] = master.detach().clone()
            averages.append(state[SLOT])
            weights.append(master)
    if averages:
        torch._foreach_lerp_(averages, weights, 1.0 - decay)


def averages_of(optimizer: torch.optim.Optimizer | None) -> dict[torch.Tensor, torch.Tensor]:
    """Return the moving average of each weight that has one."""
    states = optimizer.state.items() if optimizer is not None else ()
    return {master: state[SLOT] for master, state in states if SLOT in state}


@torch.no_grad()
def swap(averages: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Swap each weight with its moving average, in place."""
    for weight, average in averages.items():
        kept = weight.detach().clone()
        weight.copy_(average)
        average.copy_(kept)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_ratio"]


def _constants(config: Config) -> dict[str, Any]:
    if "adam" not in config.optimizer:
        return {}
    return {"lr": 0.0, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}


def _adamw(groups: Groups, *, fused: bool | None = None, **constants: Any) -> torch.optim.Optimizer:
    if fused is None and all(master.is_cuda for group in groups for master in group["params"]):
        fused = True  # one kernel for many weights
    return torch.optim.AdamW(groups, fused=fused, **constants)


def _bitsandbytes(groups: Groups, *, kind: str, **constants: Any) -> torch.optim.Optimizer:
    import bitsandbytes.optim

    optimizer: torch.optim.Optimizer = getattr(bitsandbytes.optim, kind)(groups, **constants)
    return optimizer


_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "fused_adamw": partial(_adamw, fused=True),
    "adam": torch.optim.Adam,
    "fused_adam": partial(torch.optim.Adam, fused=True),
    "adamw_8bit": partial(_bitsandbytes, kind="AdamW8bit"),
    "paged_adamw_8bit": partial(_bitsandbytes, kind="PagedAdamW8bit"),
    "lion": Lion,
    "lion_8bit": partial(_bitsandbytes, kind="Lion8bit", lr=0.0, betas=LION_BETAS),
    "sgd": partial(torch.optim.SGD, lr=0.0),
    "adadelta": partial(torch.optim.Adadelta, lr=0.0),
    # By default adafactor scales updates by the RMS of the parameter, at least 1e-3, so B matrices hardly move: they start
    # at zero. A floor of 1 turns this off and makes learning rates comparable to adamw's.
    "adafactor": partial(torch.optim.Adafactor, lr=0.0, eps=(None, 1.0)),
}
