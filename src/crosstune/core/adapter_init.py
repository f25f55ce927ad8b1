"""Initialize adapter weights with the same numbers in every engine."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def uniform_by_name(name: str, *, shape: tuple[int, int], seed: int) -> NDArray[np.float32]:
    """Return values uniform in +-1/sqrt(fan_in), from a random stream that depends on the name and the seed.

    This is the usual initialization of LoRA's A (Kaiming uniform with a = sqrt(5)); B starts at zero.
    """
    digest = hashlib.sha256(name.encode()).digest()
    key = (seed, int.from_bytes(digest[:8], "little"))
    bound = 1.0 / np.sqrt(shape[1])
    generator = np.random.Generator(np.random.Philox(key=key))
    return generator.uniform(-bound, bound, size=shape).astype(np.float32)
