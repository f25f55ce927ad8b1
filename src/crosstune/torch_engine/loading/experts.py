"""Find the stacked weights of a mixture of experts, and multiply with them when they are quantized or adapted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from crosstune.models.adapter_choice import STACKS
from crosstune.torch_engine.quantized import StoredWeight, frozen_linear, is_linear

_FORWARD = "crosstune"
"""The name under which transformers finds `experts_forward`."""
_REPLACEABLE = ("_apply_gate", "has_gate", "is_transposed", "num_experts")
_SINGLE = (nn.Embedding, nn.modules.conv._ConvNd)


def expert_weights(model: nn.Module) -> list[str]:
    """Return the names of all weights that contain several experts, including those that cannot be adapted."""
    names = [
        f"{name}.{part}"
        for name, module in model.named_modules()
        if not is_linear(module) and not isinstance(module, _SINGLE)
        for part, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 or (parameter.ndim == 2 and "Expert" in type(module).__name__)
        if parameter.is_floating_point() and not part.endswith("bias")
    ]
    return [name for name in names if not name.endswith(".base")] + [
        name for name in expert_stacks(model) if name not in names
    ]


def expert_stacks(model: nn.Module) -> list[str]:
    """Return the names of the stacks that can be quantized and adapted, or already are: transformers accepts
    `experts_forward` for their modules."""
    return [
        f"{name}.{part}"
        for name, module in model.named_modules()
        if all(hasattr(module, needed) for needed in _REPLACEABLE)
        for part in STACKS
        if isinstance(stack := getattr(module, part, None), nn.Module) or getattr(stack, "ndim", 0) == 3
    ]


def stack_shape(stack: Any, *, transposed: bool) -> tuple[int, int, int]:
    """Return the number of experts, and the rows and columns of each matrix."""
    if isinstance(stack, QuantStack):
        return (len(stack.experts), *stack.experts[0].shape)
    experts, rows, columns = stack.shape
    return (experts, columns, rows) if transposed else (experts, rows, columns)


def replace_stack(module: Any, part: str, stack: nn.Module) -> None:
    """Replace a stack with a module, and make transformers call `experts_forward`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    delattr(module, part)
    module.add_module(part, stack)
    ALL_EXPERTS_FUNCTIONS.register(_FORWARD, experts_forward)
    module.config._experts_implementation = _FORWARD


@dataclass(frozen=True)
class Routing:
    """The expert of each row of an input whose rows are sorted by expert."""

    experts: torch.Tensor
    ends: torch.Tensor
    """The index after the last row of each expert."""


class QuantStack(nn.Module):
    """Quantized, frozen weights of several experts. Each dense matrix exists only during its matmul."""

    def __init__(self, experts: Sequence[StoredWeight]) -> None:
        super().__init__()
        self.experts: Any = nn.ModuleList(experts)

    def forward(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        parts, start = [], 0
        for stored, end in zip(self.experts, routing.ends.tolist(), strict=True):
            if end > start:
                parts.append(frozen_linear(x[start:end], stored, None))
            start = end
        return torch.cat(parts)


def multiply(stack: Any, x: torch.Tensor, routing: Routing, *, transposed: bool) -> torch.Tensor:
    """Multiply each row with the matrix of its expert."""
    if isinstance(stack, nn.Module):
        return stack(x, routing)
    return grouped_product(x, stack.to(x.dtype), routing, transposed=transposed)


def grouped_product(
    x: torch.Tensor, weights: torch.Tensor, routing: Routing, *, transposed: bool = False
) -> torch.Tensor:
    from transformers.integrations.moe import _grouped_linear

    return _grouped_linear(x, weights, routing.ends, is_transposed=transposed)


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute like transformers' `grouped_mm`, with stacks that may be modules. Rows are sorted by expert, so each expert
    reads a slice."""
    chosen, (num_tokens, width) = top_k_index.size(-1), hidden_states.shape
    experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
    counts = torch.zeros(self.num_experts, dtype=torch.int32, device=experts.device)
    counts = counts.index_add_(0, experts, torch.ones_like(experts, dtype=torch.int32))
    routing = Routing(experts, torch.cumsum(counts, 0, dtype=torch.int32))
    x = hidden_states[order // chosen]
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    x = _project(self, "gate_up_proj" if self.has_gate else "up_proj", x, routing)
    x = self._apply_gate(x) if self.has_gate else self.act_fn(x)
    x = _project(self, "down_proj", x, routing)
    if getattr(self, "has_post_expert_norm", False):
        x = self.post_expert_norm(x)
    x = x * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    return x[back].view(num_tokens, chosen, width).sum(dim=1).to(hidden_states.dtype)


def _project(module: Any, part: str, x: torch.Tensor, routing: Routing) -> torch.Tensor:
    out = multiply(getattr(module, part), x, routing, transposed=module.is_transposed)
    return out + getattr(module, f"{part}_bias")[routing.experts].to(out.dtype) if module.has_bias else out
