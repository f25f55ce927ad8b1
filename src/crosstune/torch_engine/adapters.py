"""LoRA and DoRA adapters on frozen linear layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from crosstune.core.adapter_init import uniform_by_name
from crosstune.models.adapter_choice import AdapterSettings, choose_names, describe_left_out, short_names
from crosstune.torch_engine.bypassed_layers import reads_weight
from crosstune.torch_engine.experts import expert_weights
from crosstune.torch_engine.quantized import QuantLinear, dense_weight, weight_device


class AdaptedLinear(nn.Module):
    """y = base(x) + scale * B(A(dropout(x))). A and B are stored in fp32 and cast to the dtype of x."""

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
        """Return the adapter folded into the base weight, in fp32."""
        return dense_weight(self.base, torch.float32) + self.scale * (self.lora_B @ self.lora_A).detach()


class DoraLinear(AdaptedLinear):
    """W + scale * B A with each row rescaled to a learned norm.

    The row norms are treated as constants in the backward pass, as the authors of DoRA propose to save memory.
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
    model: nn.Module, *, targets: str, settings: AdapterSettings, seed: int, last_layers: int | None = None
) -> dict[str, AdaptedLinear]:
    """Freeze the model, add an adapter to each chosen linear layer, and return the adapters by canonical name."""
    model.requires_grad_(False)
    kind = DoraLinear if settings.magnitudes else AdaptedLinear
    adapters: dict[str, AdaptedLinear] = {}
    for name in choose_targets(model, targets, last_layers=last_layers):
        parent_name, _, child = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        adapters[name] = kind(getattr(parent, child), name=name, settings=settings, seed=seed)
        setattr(parent, child, adapters[name])
    return adapters


def name_targets(model: nn.Module, adapters: Mapping[str, AdaptedLinear]) -> list[str]:
    without = [name for name in _linear_names(model) if name.removesuffix(".base") not in adapters]
    return short_names(adapters, without)


def choose_targets(model: nn.Module, targets: str, *, last_layers: int | None = None) -> list[str]:
    names = _linear_names(model)
    return choose_names(names, targets, model=type(model).__name__, last_layers=last_layers)


def warn_of_left_out(model: nn.Module, targets: str, *, last_layers: int | None = None) -> list[str]:
    """Return a warning if `all` does not mean all: weights of experts that get no adapter."""
    if targets != "all":
        return []
    return describe_left_out(choose_targets(model, targets, last_layers=last_layers), expert_weights(model))


def _linear_names(model: nn.Module) -> list[str]:
    """Return all linear layers, quantized or not, except the output head and layers for which `reads_weight` holds."""
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, QuantLinear))
        and module is not head
        and not reads_weight(model, name)
    ]
