"""A frozen weight of few bits, and the linear layer that gradients pass through."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from crosstune.core.errors import UserError
from crosstune.core.names import load_plugin

QUANT_PACKAGE = "crosstune.torch_engine.quant"


@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """How weights are quantized: everything that the numbers depend on."""

    quantizer: str
    bits: int
    group_size: int
    kind: str = "auto"
    """nf4 or fp4 (bnb), int or float8 (quanto); auto is the library's usual one."""
    double: bool = True
    """Quantize the scales too (bnb, 4 bits)."""


class StoredWeight(Protocol):
    """A quantized matrix. It knows how to become a dense one again."""

    shape: tuple[int, int]

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor: ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that is stored, by name; their bytes are the memory of the weight."""
        ...


def stored_bytes(weight: StoredWeight) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in weight.tensors().values())


def open_quantizer(spec: QuantSpec) -> ModuleType:
    """The quantizer's file, with the bits checked against what it has."""
    module = load_plugin(QUANT_PACKAGE, spec.quantizer, kind="quantizer")
    if spec.bits not in module.BITS:
        raise UserError(
            f"{spec.quantizer} has no {spec.bits} bits.",
            do=f"use --n_bits {', '.join(map(str, module.BITS))}",
        )
    return module


class QuantLinear(nn.Module):
    """y = x W^T + b with a quantized, frozen W. The dense W exists only while it is multiplied with."""

    def __init__(self, weight: StoredWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.stored = weight
        self.out_features, self.in_features = weight.shape
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = self.bias.to(x.dtype) if self.bias is not None else None
        return _ThroughFrozen.apply(x, self.stored, bias)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, {type(self.stored).__name__}"
        )


class _ThroughFrozen(torch.autograd.Function):
    """The product with a frozen weight, which is made dense once more for the gradient instead of being kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: StoredWeight, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.weight = weight
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight.dequantize(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        [gradient] = gradients
        with torch.autocast(gradient.device.type, enabled=False):
            return gradient @ ctx.weight.dequantize(gradient.dtype), None, None


def dense_weight(layer: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """The weight of a linear layer, quantized or not, as a dense matrix."""
    if isinstance(layer, QuantLinear):
        return layer.stored.dequantize(dtype)
    assert isinstance(layer, nn.Linear), type(layer)
    return layer.weight.detach().to(dtype)


def weight_device(layer: nn.Module) -> torch.device:
    if isinstance(layer, QuantLinear):
        return next(iter(layer.stored.tensors().values())).device
    assert isinstance(layer, nn.Linear), type(layer)
    return layer.weight.device
