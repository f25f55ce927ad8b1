"""Keep what belongs to the whole process: MLX's random state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx


@contextlib.contextmanager
def keep_process_state() -> Iterator[None]:
    """Put the random state back afterwards."""
    state: Any = mx.random.state
    before = list(state)
    try:
        yield
    finally:
        state[:] = before
