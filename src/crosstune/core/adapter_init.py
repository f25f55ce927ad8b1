"""Initial values of adapters, the same numbers for every engine."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def uniform_by_name(name: str, *, shape: tuple[int, int], seed: int) -> NDArray[np.float32]:
    """Uniform in +-1/sqrt(fan in), drawn from a stream of its own for each name.

    This is the usual start of the A matrix of LoRA (Kaiming uniform with a = sqrt 5); B starts at zero.
    """
    digest = hashlib.sha256(name.encode()).digest()
    key = (seed, int.from_bytes(digest[:8], "little"))
    bound = 1.0 / np.sqrt(shape[1])
    generator = np.random.Generator(np.random.Philox(key=key))
    return generator.uniform(-bound, bound, size=shape).astype(np.float32)
