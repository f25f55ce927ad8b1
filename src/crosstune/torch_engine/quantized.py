"""Quantized, frozen weights: storage and matmul; and helpers for linear layers, quantized or not."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from crosstune.core.errors import UserError
from crosstune.core.names import load_plugin
from crosstune.core.protocols import Array
from crosstune.core.quantization import QuantSpec

QUANT_PACKAGE = "crosstune.torch_engine.quant"
PACKED = "packed"
"""Name of the tensor with the packed bits, for every quantizer."""


def open_quantizer(spec: QuantSpec) -> ModuleType:
    """Return the quantizer's module; raise if it does not support the bits or kind."""
    module = load_plugin(QUANT_PACKAGE, spec.quantizer, kind="quantizer")
    if spec.bits not in module.BITS:
        raise UserError(
            f"{spec.quantizer} does not support {spec.bits}-bit weights.",
            do=f"use --n_bits {', '.join(map(str, module.BITS))}",
        )
    if not getattr(module, "TAKES_KIND", False) and spec.kind not in ("auto", "int"):
        raise UserError(f"--quant_type does not apply to {spec.quantizer}.", do="remove --quant_type")
    return module


def quantize_weight(weight: torch.Tensor, spec: QuantSpec, dtype: torch.dtype) -> StoredWeight:
    """Quantize a weight on its device; `dtype` is the dtype of the scales unless the library chooses it."""
    tensors, facts = open_quantizer(spec).quantize(weight, spec, dtype)
    return StoredWeight(spec.quantizer, tensors, facts)


def restore_weight(
    quantizer: str, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]
) -> StoredWeight:
    """Return a weight from the tensors and facts of a file, including files in an older layout."""
    restore = getattr(load_plugin(QUANT_PACKAGE, quantizer, kind="quantizer"), "restore", None)
    if restore is not None:
        tensors, facts = restore(tensors, facts)
    return StoredWeight(quantizer, tensors, facts)


def dequantize_stack(
    quantizer: str, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any], dtype: torch.dtype
) -> torch.Tensor:
    """Return the dense matrices of tensors that are stacked along the first dimension."""
    module = load_plugin(QUANT_PACKAGE, quantizer, kind="quantizer")
    at_once = getattr(module, "dequantize_stack", None)
    if at_once is not None:
        return cast("torch.Tensor", at_once(tensors, facts, dtype))
    count = len(tensors[PACKED])
    each = ({name: tensor[number] for name, tensor in tensors.items()} for number in range(count))
    return torch.stack([module.dequantize(parts, facts, dtype) for parts in each])


class StoredWeight(nn.Module):
    """A quantized matrix: tensors registered with torch, and facts as plain JSON data.

    The packed bits are a frozen parameter, because FSDP2 shards only parameters. Their dtype is an integer, since FSDP2's
    mixed precision would round floats; scales, zero points and tables are buffers for the same reason.
    """

    packed: nn.Parameter

    def __init__(self, quantizer: str, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        super().__init__()
        assert not tensors[PACKED].is_floating_point(), "packed bits are integers"
        self.quantizer = quantizer
        self.facts: Mapping[str, Any] = dict(facts)
        """JSON metadata of the quantizer."""
        rows, columns = facts["shape"]
        self.shape: tuple[int, int] = (rows, columns)
        self.error_factors: tuple[Array, Array] | None = None
        """LoftQ's initial A and B, until the layer has its adapter."""
        self.packed_dtype = tensors[PACKED].dtype
        self._make_dense = load_plugin(QUANT_PACKAGE, quantizer, kind="quantizer").dequantize
        for name, tensor in tensors.items():
            if name == PACKED:
                self.packed = nn.Parameter(tensor.detach(), requires_grad=False)
            else:
                self.register_buffer(name, tensor.detach())

    @property
    def num_weights(self) -> int:
        return self.shape[0] * self.shape[1]

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the dense matrix. It is not cached."""
        dense = self._make_dense(self.tensors(), self.facts, dtype)
        return cast("torch.Tensor", dense)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all stored tensors by name."""
        parts = {**self._parameters, **self._buffers}
        found = {name: tensor for name, tensor in parts.items() if tensor is not None}
        if found[PACKED].is_floating_point():
            found[PACKED] = found[PACKED].view(self.packed_dtype)
        return found

    def store_as_float(self) -> None:
        """Store the packed integers in a float dtype of the same size, for an FSDP2 that rejects integers."""
        if not self.packed.is_floating_point():
            floats = {1: torch.float8_e4m3fn, 2: torch.float16, 4: torch.float32, 8: torch.float64}
            viewed = self.packed.detach().view(floats[self.packed.element_size()])
            self.packed = nn.Parameter(viewed, requires_grad=False)

    def extra_repr(self) -> str:
        return f"{self.quantizer}, {self.shape[0]} x {self.shape[1]}"

    def get_extra_state(self) -> torch.Tensor:
        """Return the facts as JSON in a uint8 tensor: a state dict contains only tensors."""
        return torch.frombuffer(bytearray(self._identity().encode()), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Do nothing: `check_state` has compared the facts."""

    def _identity(self) -> str:
        dtypes = {
            name: str(self.packed_dtype if name == PACKED else tensor.dtype).removeprefix("torch.")
            for name, tensor in (*self.named_parameters(recurse=False), *self.named_buffers(recurse=False))
        }
        facts = {"quantizer": self.quantizer, "facts": self.facts, "dtypes": dtypes}
        return json.dumps(facts, sort_keys=True)

    def check_state(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Raise if a weight in a state dict has a different quantization, even if the shapes match."""
        extra_state = state_dict.get(f"{prefix}_extra_state")
        if extra_state is not None:
            identity = bytes(extra_state.cpu().tolist()).decode(errors="replace")
            if identity != self._identity():
                raise UserError(
                    f"The weights of {prefix.removesuffix('.stored.')} are quantized differently from the layer.",
                    why=f"they are {identity}; the layer is {self._identity()}.",
                    do="quantize the model in the same way as the saved one, then load the state",
                )

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any, **named: Any
    ) -> None:
        self.check_state(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments, **named)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> StoredWeight:
        """Move to a device with the model, but keep the dtypes."""

        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            changed = fn(tensor)
            return changed if changed.dtype == tensor.dtype else tensor.to(changed.device)

        super()._apply(keep_dtype, recurse)
        return self


class QuantLinear(nn.Module):
    """y = x W^T + b with a quantized, frozen W. The dense W exists only during the matmul."""

    stored: StoredWeight

    def __init__(self, weight: StoredWeight, bias: torch.Tensor | None) -> None:
        nn.Module.__init__(self)  # not nn.Linear.__init__ of a subclass: it would make a dense weight
        self.stored = weight
        self.out_features, self.in_features = weight.shape
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = self.bias.to(x.dtype) if self.bias is not None else None
        return frozen_linear(x, self.stored, bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any, **named: Any
    ) -> None:
        """Check the weight before copying the bias, so that a rejected layer does not change."""
        self.stored.check_state(state_dict, f"{prefix}stored.")
        super()._load_from_state_dict(state_dict, prefix, *arguments, **named)


def frozen_linear(x: torch.Tensor, weight: StoredWeight, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = _FrozenLinear.apply(x, weight, bias)
    return product


class _FrozenLinear(torch.autograd.Function):
    """Matmul with a frozen weight; the backward pass dequantizes it again instead of saving it."""

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


def is_linear(layer: nn.Module) -> bool:
    """Return True for a linear layer, quantized or not."""
    return isinstance(layer, (nn.Linear, QuantLinear)) or is_conv1d(layer)


def is_conv1d(layer: nn.Module) -> bool:
    """Return True for transformers' Conv1D (GPT-2), whose weight has a row per input."""
    known = sys.modules.get("transformers.pytorch_utils")  # imported by every model that has one
    return known is not None and isinstance(layer, known.Conv1D)


def linear_shape(layer: Any) -> tuple[int, int]:
    """Return the outputs and inputs of a linear layer."""
    if is_conv1d(layer):
        inputs, outputs = layer.weight.shape
        return outputs, inputs
    return layer.out_features, layer.in_features


def dense_weight(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight of a linear layer, quantized or not, as a dense matrix with a row per output."""
    if isinstance(layer, QuantLinear):
        return layer.stored.dequantize(dtype)
    assert is_linear(layer), type(layer)
    weight: torch.Tensor = layer.weight.detach()
    return (weight.T if is_conv1d(layer) else weight).to(dtype)


def weight_device(layer: Any) -> torch.device:
    if isinstance(layer, QuantLinear):
        return layer.stored.packed.device
    assert is_linear(layer), type(layer)
    device: torch.device = layer.weight.device
    return device


def count_weights(model: nn.Module) -> int:
    """Return the number of weights of a model, counting each weight in packed bytes."""
    stored = [module for module in model.modules() if isinstance(module, StoredWeight)]
    parts = sum(parameter.numel() for weight in stored for parameter in weight.parameters())
    dense = sum(weight.num_weights for weight in stored)
    return sum(parameter.numel() for parameter in model.parameters()) - parts + dense


def reads_weight(model: nn.Module, name: str) -> bool:
    """Return True if the parent of a layer reads its weight instead of calling it, like Mamba's mixer. Such a layer can be
    neither quantized nor adapted."""
    parent, _, child = name.rpartition(".")
    kind: Any = type(model.get_submodule(parent))
    return f"self.{child}.weight" in _source(kind)


@lru_cache(maxsize=256)
def _source(kind: Any) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # the class has no source file
        return ""
