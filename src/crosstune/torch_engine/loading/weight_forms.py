"""Describe how parameters store the matrices of linear layers: plain, transposed, or stacked by expert."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from crosstune.models.adapter_choice import STACKS
from crosstune.torch_engine.experts import QuantStack, replace_stack, stack_shape
from crosstune.torch_engine.quantized import (
    QuantLinear,
    StoredWeight,
    is_conv1d,
    is_linear,
    linear_shape,
    reads_weight,
)
from crosstune.torch_engine.sharding.local_shard import find_blocks

_REPLACEABLE = ("_apply_gate", "has_gate", "is_transposed", "num_experts")
_SINGLE = (nn.Embedding, nn.modules.conv._ConvNd, StoredWeight)


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
        and not getattr(module, "has_post_expert_norm", False)
        for part in STACKS
        if isinstance(stack := getattr(module, part, None), nn.Module) or getattr(stack, "ndim", 0) == 3
    ]


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
            replace_stack(parent, child, QuantStack(stored, name=self.parameter))
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
