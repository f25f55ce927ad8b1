"""Compute the experts of a mixture with grouped products: dense or quantized stacks, each with an adapter or without."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from crosstune.core.errors import UserError
from crosstune.core.weights import uniform_by_name
from crosstune.estimate.memory import EXPERTS_AT_ONCE_BYTES
from crosstune.models.adapter_choice import AdapterSettings
from crosstune.torch_engine.quantized import StoredWeight, dequantize_stack

_FORWARD = "crosstune"
"""The name under which transformers finds `experts_forward`."""
_PARTS = ("gate_up_proj", "up_proj")
_Gradients = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class Routing:
    """The rows of a layer's experts, sorted by expert: each token has a row for each of its experts."""

    order: torch.Tensor
    """The number of each row in the order of the tokens."""
    tokens: torch.Tensor
    """The token of each row."""
    experts: torch.Tensor
    """The expert of each row."""
    ends: torch.Tensor
    """The index after the last row of each expert."""

    @classmethod
    def of(cls, top_k_index: torch.Tensor, num_experts: int) -> Routing:
        experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
        counts = torch.zeros(num_experts, dtype=torch.int32, device=experts.device)
        counts = counts.index_add_(0, experts, torch.ones_like(experts, dtype=torch.int32))
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        return cls(order, order // top_k_index.shape[-1], experts, ends)

    @cached_property
    def bounds(self) -> list[int]:
        """0 and the ends, on the host: the device is waited for once."""
        return [0, *self.ends.tolist()]

    @cached_property
    def back(self) -> torch.Tensor:
        """The sorted place of each row in the order of the tokens."""
        places = torch.empty_like(self.order)
        places[self.order] = torch.arange(len(self.order), device=self.order.device)
        return places

    def sum_by_token(self, rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
        return rows[self.back].view(num_tokens, -1, rows.shape[1]).sum(dim=1)


class QuantStack(StoredWeight):
    """Quantized, frozen matrices of all experts, with one tensor for each part of a `StoredWeight`."""

    def __init__(self, experts: Sequence[StoredWeight], *, name: str = "experts") -> None:
        first, parts = experts[0], [expert.tensors() for expert in experts]
        layout = {part: (tensor.shape, tensor.dtype) for part, tensor in parts[0].items()}
        for expert, tensors in zip(experts, parts, strict=True):
            if expert.facts != first.facts or layout != {p: (t.shape, t.dtype) for p, t in tensors.items()}:
                raise UserError(
                    f"The experts of {name} are quantized differently.",
                    why=f"one is {dict(first.facts)}, another {dict(expert.facts)}.",
                    do="quantize the original model again",
                )
        stacked = {part: torch.stack([tensors[part] for tensors in parts]) for part in layout}
        super().__init__(first.quantizer, stacked, first.facts)
        self.num_experts = len(experts)

    @property
    def num_weights(self) -> int:
        return self.num_experts * super().num_weights

    def dense(self, experts: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrices of some experts: experts x outputs x inputs."""
        parts = {name: tensor[experts] for name, tensor in self.tensors().items()}
        return dequantize_stack(self.quantizer, parts, self.facts, dtype)

    def product(self, x: torch.Tensor, routing: Routing, *, transposed: bool) -> torch.Tensor:
        """Multiply each row with the matrix of its expert, W^T or, if `transposed`, W. Dense matrices exist only meanwhile."""
        rows, columns = self.shape
        # On the CPU nothing waits, and experts without rows need no matrix.
        limit = EXPERTS_AT_ONCE_BYTES if x.device.type != "cpu" else 0
        at_once = max(1, limit // (rows * columns * x.element_size()))
        if at_once >= self.num_experts:
            return _grouped(x, self._oriented(slice(None), x.dtype, transposed), routing.ends)
        out = x.new_empty(len(x), columns if transposed else rows)
        for start in range(0, self.num_experts, at_once):
            experts = slice(start, min(start + at_once, self.num_experts))
            begin, end = routing.bounds[experts.start], routing.bounds[experts.stop]
            if end > begin:
                weights = self._oriented(experts, x.dtype, transposed)
                out[begin:end] = _grouped(x[begin:end], weights, routing.ends[experts] - begin)
        return out

    def _oriented(self, experts: slice, dtype: torch.dtype, transposed: bool) -> torch.Tensor:
        dense = self.dense(experts, dtype)
        return dense if transposed else dense.transpose(1, 2)


class AdaptedStack(nn.Module):
    """A stack of experts, each with its own A and B: W + scale * B A.

    The parameters have the layout of PEFT's `target_parameters`: the rows of A are grouped by expert, the columns of B
    alternate between the experts.
    """

    def __init__(
        self, base: Any, *, name: str, settings: AdapterSettings, seed: int, transposed: bool
    ) -> None:
        super().__init__()
        self.base = base
        self.scale, self.dropout, self.rank = settings.scale, settings.dropout, settings.rank
        self.num_experts, rows, columns = stack_shape(base, transposed=transposed)
        device = next(base.parameters()).device if isinstance(base, nn.Module) else base.device
        height = settings.rank * self.num_experts
        start = uniform_by_name(name, shape=(height, columns), seed=seed)
        self.lora_A = nn.Parameter(torch.from_numpy(start).to(device))
        self.lora_B = nn.Parameter(torch.zeros(rows, height, device=device))

    def factors(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A as experts x rank x inputs and scale * B as experts x outputs x rank."""
        a, b = split_by_expert(
            self.lora_A.detach(), self.lora_B.detach() * self.scale, num_experts=self.num_experts
        )
        # The kernel needs rows of a multiple of 16 bytes; zeros do not change the result.
        fill = -self.rank % 8
        return F.pad(a.to(dtype), (0, 0, 0, fill)), F.pad(b.to(dtype), (0, fill))

    def join_gradients(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of `factors` as gradients of the parameters."""
        dtype = self.lora_A.dtype
        b = b[..., : self.rank].to(dtype) * self.scale
        return a[:, : self.rank].to(dtype).flatten(0, 1), b.permute(1, 2, 0).flatten(1)

    def trained(self) -> dict[str, nn.Parameter]:
        return {"lora_A.weight": self.lora_A, "lora_B.weight": self.lora_B}


def split_by_expert(
    a: torch.Tensor, b: torch.Tensor, *, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A as experts x rank x inputs and B as experts x outputs x rank."""
    by_expert = b.reshape(b.shape[0], -1, num_experts).permute(2, 0, 1)
    return a.reshape(num_experts, -1, a.shape[1]), by_expert.contiguous()


def stack_shape(stack: Any, *, transposed: bool) -> tuple[int, int, int]:
    """Return the number of experts, and the rows and columns of each matrix."""
    if isinstance(stack, QuantStack):
        return (stack.num_experts, *stack.shape)
    experts, rows, columns = stack.shape
    return (experts, columns, rows) if transposed else (experts, rows, columns)


def replace_stack(module: Any, part: str, stack: nn.Module) -> None:
    """Replace a stack with a module, and make transformers call `experts_forward`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    delattr(module, part)
    module.add_module(part, stack)
    ALL_EXPERTS_FUNCTIONS.register(_FORWARD, experts_forward)
    module.config._experts_implementation = _FORWARD


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute like transformers' `grouped_mm`, with stacks that may be modules."""
    routing = Routing.of(top_k_index, self.num_experts)
    dtype = hidden_states.dtype
    if torch.is_autocast_enabled(hidden_states.device.type):
        dtype = torch.get_autocast_dtype(hidden_states.device.type)
    tensors = [tensor for part in _projections(self) for tensor in part.tensors()]
    with torch.autocast(hidden_states.device.type, enabled=False):
        out: torch.Tensor = _Experts.apply(self, routing, dtype, hidden_states, top_k_weights, *tensors)
    return out


class _Experts(torch.autograd.Function):
    """The experts of a layer. Only the output of the first projection is kept, next to the inputs: the backward pass
    gathers and activates the rows again, and needs no output of the second projection."""

    @staticmethod
    def forward(
        ctx: Any,
        module: Any,
        routing: Routing,
        dtype: torch.dtype,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        *_: torch.Tensor | None,
    ) -> torch.Tensor:
        first, second = _projections(module)
        x = hidden.index_select(0, routing.tokens).to(dtype)
        masks = [first.mask(x)]
        inner = first.product(x, routing, masks[0])
        del x
        active = first.activate(inner)
        masks.append(second.mask(active))
        out = second.product(active, routing, masks[1])
        del active
        ctx.module, ctx.routing = module, routing
        ctx.save_for_backward(hidden, weights, inner, *masks)
        by_row = weights.reshape(-1)[routing.order].unsqueeze(1)
        out = out.mul_(by_row) if by_row.dtype == out.dtype else out * by_row
        return routing.sum_by_token(out, len(hidden)).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        hidden, weights, inner, first_mask, second_mask = ctx.saved_tensors
        routing: Routing = ctx.routing
        first, second = _projections(ctx.module)
        by_row = weights.reshape(-1)[routing.order].unsqueeze(1)
        with torch.autocast(hidden.device.type, enabled=False):
            d_out = gradients[0].index_select(0, routing.tokens).to(inner.dtype)
            with torch.enable_grad():
                inner = inner.detach().requires_grad_()
                active = first.activate(inner)
            d_active, of_second = second.gradients(active.detach(), d_out, routing, second_mask, by_row)
            # The product of a row's output and its gradient, without the output.
            wide = torch.promote_types(inner.dtype, torch.float32)
            d_weights = (d_active * active.detach()).sum(1, dtype=wide)
            if second.bias is not None:
                bias = second.bias.detach()[routing.experts].to(inner.dtype)
                d_weights += (d_out * bias).sum(1, dtype=wide)
            del d_out
            [d_inner] = torch.autograd.grad(active, inner, (d_active * by_row).to(inner.dtype))
            del active, d_active
            x = hidden.index_select(0, routing.tokens).to(inner.dtype)
            d_x, of_first = first.gradients(x, d_inner, routing, first_mask, None)
            d_hidden = routing.sum_by_token(d_x, len(hidden)).to(hidden.dtype)
        d_weights = d_weights[routing.back].view(weights.shape).to(weights.dtype)
        return None, None, None, d_hidden, d_weights, *of_first, *of_second


@dataclass(frozen=True)
class _Projection:
    """One of the two linear layers of all experts of a layer."""

    base: Any
    """A `QuantStack`, or a parameter."""
    adapter: AdaptedStack | None
    bias: torch.Tensor | None
    transposed: bool
    """True if the parameter has a row per input."""
    activate: Callable[[torch.Tensor], torch.Tensor]

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors that may need a gradient: A, B, the base and the bias."""
        base = None if isinstance(self.base, QuantStack) else self.base
        if self.adapter is None:
            return None, None, base, self.bias
        return self.adapter.lora_A, self.adapter.lora_B, base, self.bias

    def mask(self, x: torch.Tensor) -> torch.Tensor | None:
        """Draw the mask of the adapter's dropout."""
        if self.adapter is None or not self.adapter.dropout or not self.adapter.training:
            return None
        return F.dropout(torch.ones_like(x), self.adapter.dropout)

    def product(self, x: torch.Tensor, routing: Routing, mask: torch.Tensor | None) -> torch.Tensor:
        out = self._base_product(x, routing, transposed=False)
        if self.adapter is not None:
            a, b = self.adapter.factors(x.dtype)
            low = _grouped(x if mask is None else x * mask, a.transpose(1, 2), routing.ends)
            out += _grouped(low, b.transpose(1, 2), routing.ends)
        if self.bias is not None:
            out += self.bias.detach()[routing.experts].to(out.dtype)
        return out

    def gradients(
        self,
        x: torch.Tensor,
        d_out: torch.Tensor,
        routing: Routing,
        mask: torch.Tensor | None,
        by_row: torch.Tensor | None,
    ) -> tuple[torch.Tensor, _Gradients]:
        """Return the gradients of x and of `tensors`. With `by_row`, each row of `d_out` is still to be multiplied by a
        weight; the gradient of x does not include it."""
        ends = routing.ends
        d_x = self._base_product(d_out, routing, transposed=True)
        d_a = d_b = d_base = d_bias = None
        if self.adapter is not None:
            a, b = self.adapter.factors(x.dtype)
            dropped = x if mask is None else x * mask
            low, d_low = _grouped(dropped, a.transpose(1, 2), ends), _grouped(d_out, b, ends)
            through = _grouped(d_low, a, ends)
            d_x += through if mask is None else through * mask
            if by_row is not None:
                low, d_low = (low * by_row).to(x.dtype), (d_low * by_row).to(x.dtype)
            d_a, d_b = self.adapter.join_gradients(
                _grouped_outer(d_low, dropped, routing), _grouped_outer(d_out, low, routing)
            )
        trains_base = not isinstance(self.base, QuantStack) and self.base.requires_grad
        trains_bias = self.bias is not None and self.bias.requires_grad
        if by_row is not None and (trains_base or trains_bias):
            d_out = (d_out * by_row).to(x.dtype)
        if trains_base:
            pair = (x, d_out) if self.transposed else (d_out, x)
            d_base = _grouped_outer(*pair, routing).to(self.base.dtype)
        if trains_bias:
            assert self.bias is not None
            d_bias = torch.zeros_like(self.bias).index_add_(0, routing.experts, d_out.to(self.bias.dtype))
        return d_x, (d_a, d_b, d_base, d_bias)

    def _base_product(self, x: torch.Tensor, routing: Routing, *, transposed: bool) -> torch.Tensor:
        if isinstance(self.base, QuantStack):
            return self.base.product(x, routing, transposed=transposed)
        weights = self.base.detach().to(x.dtype)
        if self.transposed == transposed:
            weights = weights.transpose(1, 2)
        return _grouped(x, weights, routing.ends)


def _projections(module: Any) -> tuple[_Projection, _Projection]:
    """Return the two projections of an experts module, as it is now: FSDP2 replaces parameters between passes."""
    activate = module._apply_gate if module.has_gate else module.act_fn
    found = []
    for part in (_PARTS[0] if module.has_gate else _PARTS[1], "down_proj"):
        stack = getattr(module, part)
        adapter = stack if isinstance(stack, AdaptedStack) else None
        found.append(
            _Projection(
                base=stack if adapter is None else adapter.base,
                adapter=adapter,
                bias=getattr(module, f"{part}_bias") if module.has_bias else None,
                transposed=module.is_transposed,
                activate=activate,
            )
        )
    return found[0], found[1]


def _grouped(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of each group with its matrix: groups x inputs x outputs."""
    from transformers.integrations.moe import _grouped_mm

    product: torch.Tensor = x @ weights[0] if len(weights) == 1 else _grouped_mm(x, weights, ends)
    return product


def _grouped_outer(left: torch.Tensor, right: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return left^T right for the rows of each group: groups x columns of left x columns of right."""
    from transformers.integrations.moe import _can_use_grouped_mm

    if not _can_use_grouped_mm(left, right, routing.ends):
        pairs = itertools.pairwise(routing.bounds)
        return torch.stack([left[begin:end].t() @ right[begin:end] for begin, end in pairs])
    product: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm
    found: torch.Tensor = product(left.t(), right, offs=routing.ends)
    return found
