"""Quantize linear layers with MLX, and dequantize them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from crosstune.core.errors import UserError
from crosstune.mlx_engine.quant.mlx import GROUP_SIZES, check_form


def quantize_layers(model: nn.Module, layers: dict[str, nn.Module], *, bits: int, group_size: int) -> None:
    """Quantize some linear layers of a model in place, from their stored dtype."""
    check_form(bits=bits, group_size=group_size)
    for name, layer in layers.items():
        in_features = layer.weight.shape[1]
        if in_features % group_size:
            raise UserError(
                f"{name} cannot be quantized in groups of {group_size} weights.",
                why=f"its rows have {in_features} weights.",
                do=f"use a --group_size among {', '.join(map(str, GROUP_SIZES))} that divides them, or --train_type lora",
            )
    nn.quantize(model, group_size=group_size, bits=bits, class_predicate=lambda name, module: name in layers)


def linear_shape(layer: Any) -> tuple[int, int]:
    """Return the rows and columns of a linear layer, quantized or not."""
    rows, columns = layer.weight.shape
    return (rows, columns * 32 // layer.bits) if isinstance(layer, nn.QuantizedLinear) else (rows, columns)


def dense_weight(layer: Any, dtype: mx.Dtype, rows: mx.array | None = None) -> mx.array:
    """Return the weight of a linear layer, an embedding or experts, quantized or not, or some of its rows, as a dense array."""

    def part(array: Any) -> Any:
        return array if rows is None or array is None else array[rows]

    if "scales" not in layer:
        return part(layer.weight).astype(dtype)
    dense = mx.dequantize(
        part(layer.weight),
        part(layer.scales),
        part(layer.get("biases")),
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    )
    return dense.astype(dtype)
