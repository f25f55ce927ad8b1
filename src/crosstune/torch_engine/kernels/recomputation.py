"""Decide for each fast layer what its backward pass computes again, from the memory that is free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

Recompute = Literal["none", "lean", "full"]
"""What a layer's backward pass computes again: the gated activation only, in the kernel that reads its factors anyway; the norms
too; or the whole layer."""

USED_SHARE = 0.85
"""The share of the free memory that kept activations may fill; the rest is for products, gradients and fragments."""


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """The bytes that a layer keeps for the backward pass, for each token."""

    none: int
    lean: int
    full: int


def layer_bytes(config: Any, *, head_size: int, compute_bytes: int, stream_bytes: int) -> LayerBytes:
    """Return what a layer of a transformers config keeps."""
    width, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * head_size
    packed = queries + 2 * config.num_key_value_heads * head_size
    lean = 2 * width * stream_bytes + (packed + queries + 2 * inner) * compute_bytes
    return LayerBytes(
        none=lean + 2 * width * compute_bytes,
        lean=lean,
        full=width * (stream_bytes + compute_bytes),
    )


def plan_recomputation(
    cost: LayerBytes, *, num_layers: int, num_tokens: int, free_bytes: int
) -> list[Recompute]:
    """Return the cheapest mode of each layer that fits: all kept, all lean, or as many lean ones as fit after full ones."""
    room = int(free_bytes * USED_SHARE)
    none: Recompute = "none"
    lean: Recompute = "lean"
    full: Recompute = "full"
    if num_layers * num_tokens * cost.none <= room:
        return [none] * num_layers
    for num_full in range(num_layers):
        kept = num_full * cost.full + (num_layers - num_full) * cost.lean
        if (kept + (cost.lean if num_full else 0)) * num_tokens <= room:
            return [full] * num_full + [lean] * (num_layers - num_full)
    return [full] * num_layers


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a GPU, with what torch has cached."""
    module = torch.get_device_module(device)
    return int(module.mem_get_info(device)[0] + module.memory_reserved() - module.memory_allocated())
