"""Map each value of --precision to an MLX dtype. MLX has no autocast: weights have the compute dtype."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, kw_only=True)
class Precision:
    weights: mx.Dtype
    """Dtype of the weights in memory. Trained weights always have fp32 masters as well."""


PRECISIONS = {
    "fp32": Precision(weights=mx.float32),
    "bf16": Precision(weights=mx.bfloat16),
    "fp16": Precision(weights=mx.float16),
}
