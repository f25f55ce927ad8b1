"""Describe how parameters store the matrices of linear layers: plain, transposed, or stacked by expert; multiply with
stacks that are quantized or adapted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from crosstune.models.adapter_choice import STACKS
from crosstune.torch_engine.quantized import (
    QuantLinear,
    StoredWeight,
    frozen_linear,
    is_conv1d,
    is_linear,
    linear_shape,
    reads_weight,
)
from crosstune.torch_engine.sharding.local_shard import find_blocks

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


@dataclass(frozen=True, kw_only=True)
class WeightForm:
    """A parameter and the matrices in it. A matrix has a row per output."""

    parameter: str
    matrices: tuple[str, ...]
    """Names of its matrices: the linear layer, or one name per expert."""
    shape: tuple[int, int]
    """The shape of each matrix."""
    stacked: bool
    transposed: bool
    """True if the parameter stores its matrices with a row per input."""

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the matrices in the values of the parameter."""
        if self.transposed:
            tensor = tensor.transpose(-1, -2)
        return [matrix.contiguous() for matrix in (tensor if self.stacked else [tensor])]

    def join(self, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the values of the parameter; the inverse of `split`."""
        tensor = torch.stack(list(matrices)) if self.stacked else matrices[0]
        return tensor.transpose(-1, -2).contiguous() if self.transposed else tensor

    def put(self, model: nn.Module, stored: Sequence[StoredWeight]) -> None:
        """Replace the parameter by quantized matrices."""
        path = self.parameter if self.stacked else self.matrices[0]
        parent_name, _, child = path.rpartition(".")
        parent = model.get_submodule(parent_name)
        if self.stacked:
            replace_stack(parent, child, QuantStack(stored))
            return
        bias = getattr(parent, child).bias
        assert bias is None or not bias.is_meta, "names are sorted, so a bias is read before its weight"
        setattr(parent, child, QuantLinear(stored[0], bias.detach() if bias is not None else None))


def dense_shape(form: WeightForm) -> tuple[int, ...]:
    """Return the shape of the parameter."""
    shape = form.shape[::-1] if form.transposed else form.shape
    return (len(form.matrices), *shape) if form.stacked else shape


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers by name, without the head, whose errors reach the loss directly, and without layers whose
    parent reads the weight itself."""
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    return {
        name: module
        for name, module in model.named_modules()
        if is_linear(module) and module is not head and not reads_weight(model, name)
    }


def weight_forms(model: nn.Module) -> dict[str, WeightForm]:
    """Return the linear layers and expert stacks of a dense model by parameter."""
    forms = [
        single_form(name, linear_shape(module), transposed=is_conv1d(module))
        for name, module in linear_layers(model).items()
    ]
    forms += [_stack_form(name, model) for name in expert_stacks(model)]
    return {form.parameter: form for form in forms}


def outer_forms(model: nn.Module, forms: Iterable[str]) -> set[str]:
    """Return the last weight of the first block and of the last block."""
    blocks = list(find_blocks(model) or find_blocks(model, fewest=1))
    inside = [
        [name for name in forms if name.startswith(f"{block}.")] for block in (*blocks[:1], *blocks[-1:])
    ]
    return {names[-1] for names in inside if names}


def single_form(layer: str, shape: tuple[int, int], *, transposed: bool = False) -> WeightForm:
    """Return the form of a linear layer's weight."""
    return WeightForm(
        parameter=f"{layer}.weight", matrices=(layer,), shape=shape, stacked=False, transposed=transposed
    )


def _stack_form(name: str, model: nn.Module) -> WeightForm:
    parent, _, child = name.rpartition(".")
    module: Any = model.get_submodule(parent)
    experts, rows, columns = stack_shape(getattr(module, child), transposed=module.is_transposed)
    return WeightForm(
        parameter=name,
        matrices=tuple(f"{name}.{number}" for number in range(experts)),
        shape=(rows, columns),
        stacked=True,
        transposed=module.is_transposed,
    )
