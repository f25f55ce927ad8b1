"""Estimate the generation of a step's answers: the memory of the cache of keys and values, and the time of decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass

from crosstune.estimate.memory import MemoryParts
from crosstune.estimate.model_shape import ModelShape
from crosstune.estimate.step_time import DeviceSpeed

CACHE_SHARE = 0.6
"""The fraction of the memory beside the weights that the caches may use."""
MOST_ROWS_ON_GPU, MOST_ROWS_ON_CPU = 256, 64
BANDWIDTH_SHARE = 0.5
"""Share of the memory bandwidth that decoding reaches, the least that the generator is built for."""


@dataclass(frozen=True, kw_only=True)
class GenerationPhase:
    """The generation of a step on each device."""

    num_answers: int
    num_tokens: int
    """Maximum tokens of all answers."""
    num_rows: int
    """Answers that are decoded at once."""
    cache_bytes: int
    seconds: float | None
    """None for a device of unknown speed."""


def generation_phase(
    shape: ModelShape,
    memory: MemoryParts,
    *,
    num_answers: int,
    longest_prompt: int,
    max_new_tokens: int,
    usable_bytes: int,
    on_gpu: bool,
    speed: DeviceSpeed | None,
) -> GenerationPhase:
    """Estimate a step whose answers all have their maximum length, in 16 bits."""
    row_bytes = 2 * 2 * shape.keys * shape.num_layers * (longest_prompt + max_new_tokens)
    free = max(0, usable_bytes - memory.weights) if usable_bytes else row_bytes * num_answers
    most = MOST_ROWS_ON_GPU if on_gpu else MOST_ROWS_ON_CPU
    num_rows = max(1, min(num_answers, most, int(CACHE_SHARE * free) // max(1, row_bytes)))
    seconds = None
    if speed is not None:
        # Each step reads the weights, and the caches, which are half full on average.
        read = memory.weights + num_rows * row_bytes // 2
        steps = math.ceil(num_answers / num_rows) * max_new_tokens
        seconds = steps * read / (speed.memory_gb_s * 1e9 * BANDWIDTH_SHARE)
    return GenerationPhase(
        num_answers=num_answers,
        num_tokens=num_answers * max_new_tokens,
        num_rows=num_rows,
        cache_bytes=num_rows * row_bytes,
        seconds=seconds,
    )
