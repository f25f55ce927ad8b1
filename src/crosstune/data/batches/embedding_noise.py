"""Give every token of a training batch a key and a scale for noise on its embedding (NEFTune, Jain et al. 2023).

The engines hash the key with the channel into a number between -1 and 1. A key depends only on the seed, the step and the
token's row and column, so the noise is the same after a resume, at any batch size and world size, and on both engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from crosstune.data.batches.token_batch import TokenBatch

# Keeps these random streams apart from those of the data order, which have the same seed.
_NOISE_KEY = 2**41

CHANNEL, FIRST, SECOND = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35
"""Factors of the hash: key + channel * CHANNEL, then the finalizer of MurmurHash3, all modulo 2**32."""


def add_noise(batches: Sequence[TokenBatch], *, alpha: float, seed: int, step: int) -> list[TokenBatch]:
    """Return the micro-batches of a step with keys and scales. Noise of a document of n tokens is within alpha / sqrt(n),
    divided by the root of the number of channels."""
    found, row = [], 0
    for batch in batches:
        keys, scales = np.zeros(batch.segments.shape, np.uint32), np.zeros(batch.segments.shape, np.float32)
        for number, segments in enumerate(batch.segments):
            generator = np.random.Philox(key=(seed, _NOISE_KEY + step), counter=(0, 0, row, 0))
            keys[number] = generator.random_raw(len(segments)) >> 32
            lengths = np.bincount(segments)[segments]
            scales[number] = np.where(segments > 0, alpha / np.sqrt(lengths), 0.0)
            row += 1
        found.append(replace(batch, noise_keys=keys, noise_scales=scales))
    return found
