"""Add noise to the input embeddings of a model (NEFTune), from the keys of `data.batches.token_batch`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from crosstune.data.batches.token_batch import CHANNEL, FIRST, SECOND

_VALUES_AT_A_TIME = 2**23


@contextlib.contextmanager
def noisy_embeddings(
    model: nn.Module, keys: torch.Tensor | None, scales: torch.Tensor | None
) -> Iterator[None]:
    """Add noise to the model's input embeddings within the context; do nothing without keys."""
    if keys is None or scales is None:
        yield
        return

    def add(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + noise(keys, scales, output.shape[-1]).to(output.dtype)

    handle = model.get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def noise(keys: torch.Tensor, scales: torch.Tensor, channels: int) -> torch.Tensor:
    """Return noise in fp32 for int32 keys and fp32 scales of any shape, with `channels` numbers for each."""
    found = torch.empty((keys.numel(), channels), device=keys.device)
    added = torch.arange(channels, dtype=torch.int32, device=keys.device) * _signed(CHANNEL)
    rows = max(1, _VALUES_AT_A_TIME // channels)
    factors = scales.flatten() / math.sqrt(channels)
    for start in range(0, keys.numel(), rows):
        hashed = keys.flatten()[start : start + rows, None] + added
        hashed ^= (hashed >> 16) & 0xFFFF  # int32 shifts copy the sign; the products wrap around
        hashed *= _signed(FIRST)
        hashed ^= (hashed >> 13) & 0x7FFFF
        hashed *= _signed(SECOND)
        hashed ^= (hashed >> 16) & 0xFFFF
        uniform = ((hashed >> 8) & 0xFFFFFF).float() * 2.0**-23 - 1.0
        found[start : start + rows] = uniform * factors[start : start + rows, None]
    return found.reshape(*keys.shape, channels)


def _signed(value: int) -> int:
    """Return 32 bits as a signed integer."""
    return value - 2**32 if value >= 2**31 else value
