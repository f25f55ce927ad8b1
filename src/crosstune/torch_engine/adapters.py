"""LoRA: small trained matrices beside frozen linear layers."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from crosstune.core.errors import UserError
from crosstune.core.initial import uniform_by_name

DEFAULT_TARGETS = ("q_proj", "v_proj", "query_key_value", "qkv_proj", "c_attn")


class LoraLinear(nn.Module):
    """y = base(x) + scale * B(A(dropout(x))). A and B are kept in fp32 and used in the type of x."""

    def __init__(
        self, base: nn.Linear, *, name: str, rank: int, scale: float, dropout: float, seed: int
    ) -> None:
        super().__init__()
        self.base = base
        self.scale = scale
        self.dropout = dropout
        device = base.weight.device
        start = uniform_by_name(name, shape=(rank, base.in_features), seed=seed)
        self.lora_A = nn.Parameter(torch.from_numpy(start).to(device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        dropped = F.dropout(x, self.dropout, self.training) if self.dropout else x
        if not torch.is_autocast_enabled(x.device.type):
            dropped = dropped.to(out.dtype)
        low = F.linear(dropped, self.lora_A.to(dropped.dtype))
        return out + F.linear(low, (self.lora_B * self.scale).to(low.dtype)).to(out.dtype)


def add_lora(
    model: nn.Module, *, targets: str, rank: int, alpha: float, dropout: float, seed: int
) -> dict[str, LoraLinear]:
    """Freeze the model and put an adapter on each chosen linear layer. Returns them by canonical name."""
    model.requires_grad_(False)
    names = choose_targets(model, targets)
    adapters: dict[str, LoraLinear] = {}
    for name in names:
        parent_name, _, child = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        base = getattr(parent, child)
        adapter = LoraLinear(base, name=name, rank=rank, scale=alpha / rank, dropout=dropout, seed=seed)
        setattr(parent, child, adapter)
        adapters[name] = adapter
    return adapters


def choose_targets(model: nn.Module, targets: str) -> list[str]:
    """Names of the linear layers that `targets` selects: all, default, names with commas, or a regex."""
    head = _output_head(model)
    linears = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    ]
    if targets == "all":
        return linears
    wanted = DEFAULT_TARGETS if targets == "default" else tuple(word.strip() for word in targets.split(","))
    chosen = [name for name in linears if any(name == word or name.endswith("." + word) for word in wanted)]
    if not chosen and targets != "default":
        chosen = [name for name in linears if _matches(targets, name)]
    if not chosen:
        kinds = sorted({name.rpartition(".")[2] for name in linears})
        raise UserError(
            f"lora_target_modules '{targets}' matches no linear layer of this model.",
            do=f"use all, or names among: {', '.join(kinds)}",
        )
    return chosen


def _output_head(model: nn.Module) -> nn.Module | None:
    get_head = getattr(model, "get_output_embeddings", None)
    return get_head() if get_head is not None else None


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise UserError(f"lora_target_modules '{pattern}' is not a valid pattern.", why=str(error)) from error
