"""The number formats behind each name of --precision. MLX has no autocast: weights lie in the type of arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, kw_only=True)
class Precision:
    weights: mx.Dtype
    """Of the weights as they lie in memory. What is trained has fp32 masters besides, whatever this is."""


PRECISIONS = {
    "fp32": Precision(weights=mx.float32),
    "bf16": Precision(weights=mx.bfloat16),
    "fp16": Precision(weights=mx.float16),
}
