"""Preserve MLX's random state, which belongs to the whole process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np


@contextlib.contextmanager
def keep_process_state() -> Iterator[None]:
    """Restore the random state on exit."""
    state: Any = mx.random.state
    high, low = np.array(state[0]).tolist()
    try:
        yield
    finally:
        mx.random.seed(high << 32 | low)  # the key of a seed is its two halves
