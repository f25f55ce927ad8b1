"""LoRA and DoRA: small trained matrices beside frozen linear layers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.initial import uniform_by_name
from crosstune.torch_engine.quantized import QuantLinear, dense_weight, weight_device
from crosstune.torch_engine.reads import reads_weight

DEFAULT_TARGETS = ("q_proj", "v_proj", "query_key_value", "qkv_proj", "c_attn")


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    rank: int
    alpha: float
    dropout: float
    rank_stabilized: bool
    """Divide alpha by the square root of the rank (rsLoRA), not by the rank."""
    magnitudes: bool
    """DoRA: learn the length of each row of the weight apart from its direction."""

    @classmethod
    def from_config(cls, config: Config, *, method: str) -> AdapterSettings:
        return cls(
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            dropout=config.lora_dropout,
            rank_stabilized=config.use_rslora,
            magnitudes=method == "dora",
        )

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


class AdaptedLinear(nn.Module):
    """y = base(x) + scale * B(A(dropout(x))). A and B are kept in fp32 and used in the type of x."""

    def __init__(self, base: nn.Module, *, name: str, settings: AdapterSettings, seed: int) -> None:
        super().__init__()
        assert isinstance(base, (nn.Linear, QuantLinear))
        self.base = base
        self.scale = settings.scale
        self.dropout = settings.dropout
        device = weight_device(base)
        start = uniform_by_name(name, shape=(settings.rank, base.in_features), seed=seed)
        self.lora_A = nn.Parameter(torch.from_numpy(start).to(device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, settings.rank, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        return out + self.low_rank(x, out.dtype)

    def low_rank(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        dropped = F.dropout(x, self.dropout, self.training) if self.dropout else x
        if not torch.is_autocast_enabled(x.device.type):
            dropped = dropped.to(dtype)
        low = F.linear(dropped, self.lora_A.to(dropped.dtype))
        return F.linear(low, (self.lora_B * self.scale).to(low.dtype)).to(dtype)

    def trained(self) -> dict[str, nn.Parameter]:
        return {"lora_A.weight": self.lora_A, "lora_B.weight": self.lora_B}

    def merged(self) -> torch.Tensor:
        """The weight of one linear layer that does the same, in fp32."""
        return dense_weight(self.base, torch.float32) + self.scale * (self.lora_B @ self.lora_A).detach()


class DoraLinear(AdaptedLinear):
    """The rows of W + scale * B A, each brought to a length that is learned.

    The length of a row is not differentiated through, as its authors propose: less memory, hardly any difference.
    """

    def __init__(self, base: nn.Module, *, name: str, settings: AdapterSettings, seed: int) -> None:
        super().__init__(base, name=name, settings=settings, seed=seed)
        self.lora_magnitude_vector = nn.Parameter(self._row_lengths())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            ratio = self.lora_magnitude_vector / self._row_lengths()
        out = self.base(x)
        ratio = ratio.to(out.dtype)
        bias = self.base.bias
        plain = out if bias is None else out - bias.to(out.dtype)
        scaled = ratio * (plain + self.low_rank(x, out.dtype))
        return scaled if bias is None else scaled + bias.to(out.dtype)

    def trained(self) -> dict[str, nn.Parameter]:
        return super().trained() | {"lora_magnitude_vector": self.lora_magnitude_vector}

    def merged(self) -> torch.Tensor:
        ratio = self.lora_magnitude_vector.detach() / self._row_lengths()
        return ratio[:, None] * super().merged()

    @torch.no_grad()
    def _row_lengths(self) -> torch.Tensor:
        return torch.linalg.vector_norm(AdaptedLinear.merged(self), dim=1)


def add_adapters(
    model: nn.Module, *, targets: str, settings: AdapterSettings, seed: int
) -> dict[str, AdaptedLinear]:
    """Freeze the model and put an adapter on each chosen linear layer. Returns them by canonical name."""
    model.requires_grad_(False)
    kind = DoraLinear if settings.magnitudes else AdaptedLinear
    adapters: dict[str, AdaptedLinear] = {}
    for name in choose_targets(model, targets):
        parent_name, _, child = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        adapters[name] = kind(getattr(parent, child), name=name, settings=settings, seed=seed)
        setattr(parent, child, adapters[name])
    return adapters


def name_targets(model: nn.Module, adapters: Mapping[str, AdaptedLinear]) -> list[str]:
    """How PEFT is told which layers have adapters: by last names such as q_proj, or by whole names where a last
    name would also match a layer without one."""
    endings = {name.rpartition(".")[2] for name in adapters}
    bare = [name for name in _linear_names(model) if name.removesuffix(".base") not in adapters]
    if any(name.rpartition(".")[2] in endings for name in bare):
        return sorted(adapters)
    return sorted(endings)


def choose_targets(model: nn.Module, targets: str) -> list[str]:
    """Names of the linear layers that `targets` selects: all, default, names with commas, or a regex."""
    linears = _linear_names(model)
    if not linears:
        raise UserError(
            "This model has no linear layers that adapters can stand beside.",
            why=f"{type(model).__name__} builds its layers from other parts.",
            do="use --train_type full",
        )
    if targets == "all":
        return linears
    words = DEFAULT_TARGETS if targets == "default" else tuple(word.strip() for word in targets.split(","))
    by_word = {word: {name for name in linears if _is_named(name, word)} for word in words}
    idle = [word for word, names in by_word.items() if not names]
    chosen = set().union(*by_word.values())
    if idle and targets != "default":
        # A comma can also be part of one pattern.
        chosen = {name for name in linears if _matches(targets, name)}
    if not chosen:
        kinds = sorted({name.rpartition(".")[2] for name in linears})
        raise UserError(
            f"lora_target_modules '{', '.join(idle)}' matches no linear layer of this model.",
            do=f"use all, names among: {', '.join(kinds)}, or a regex of whole names",
        )
    return [name for name in linears if name in chosen]


def _linear_names(model: nn.Module) -> list[str]:
    """Every linear layer, quantized or not, except the output head and those that the model reads past."""
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, QuantLinear))
        and module is not head
        and not reads_weight(model, name)
    ]


def _is_named(name: str, word: str) -> bool:
    """By its whole or last name, or by a pattern. A word that is no pattern may still be a part of one."""
    if name == word or name.endswith("." + word):
        return True
    try:
        return re.fullmatch(word, name) is not None
    except re.error:
        return False


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise UserError(f"lora_target_modules '{pattern}' is not a valid pattern.", why=str(error)) from error
