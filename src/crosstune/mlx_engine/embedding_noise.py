"""Add noise to the input embeddings of a model (NEFTune), from the keys of `data.batches.token_batch`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import mlx.core as mx

from crosstune.data.batches.token_batch import CHANNEL, FIRST, SECOND
from crosstune.mlx_engine.wrap_call import wrap_call

NOISE = ("noise_keys", "noise_scales")


@contextlib.contextmanager
def noisy_embeddings(model: Any, arrays: Mapping[str, mx.array]) -> Iterator[None]:
    """Add noise to the first layer's input, which some models scale first; do nothing without keys."""
    if NOISE[0] not in arrays:
        yield
        return
    keys, scales = (arrays[name] for name in NOISE)

    def add(call: Callable[..., Any], layer: Any, hidden: mx.array, *args: Any, **kwargs: Any) -> Any:
        return call(hidden + noise(keys, scales, hidden.shape[-1]).astype(hidden.dtype), *args, **kwargs)

    undo = wrap_call(model.layers[0], add)
    try:
        yield
    finally:
        undo()


def noise(keys: mx.array, scales: mx.array, channels: int) -> mx.array:
    """Return noise in fp32 for uint32 keys and fp32 scales, with `channels` numbers for each."""
    hashed = keys[..., None] + mx.arange(channels, dtype=mx.uint32) * mx.array(CHANNEL, mx.uint32)
    hashed = (hashed ^ (hashed >> 16)) * mx.array(FIRST, mx.uint32)
    hashed = (hashed ^ (hashed >> 13)) * mx.array(SECOND, mx.uint32)
    hashed = hashed ^ (hashed >> 16)
    uniform = (hashed >> 8).astype(mx.float32) * 2.0**-23 - 1.0
    return uniform * (scales / math.sqrt(channels))[..., None]
