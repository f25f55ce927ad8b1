"""Set MLX's memory limits, read its memory use, convert its out-of-memory errors, and preserve its random state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import psutil

from crosstune.config.mlx_settings import MlxSettings
from crosstune.core import out_of_memory
from crosstune.core.errors import UserError
from crosstune.core.protocols import Memory

GIB = 1024**3


def set_limits(settings: MlxSettings) -> None:
    """Apply the memory limits of --mlx_config."""
    if settings.memory_limit_gb is not None:
        mx.set_memory_limit(int(settings.memory_limit_gb * GIB))
    if settings.cache_limit_gb is not None:
        mx.set_cache_limit(int(settings.cache_limit_gb * GIB))
    if settings.wired_limit_gb is not None and mx.metal.is_available():
        try:
            mx.set_wired_limit(int(settings.wired_limit_gb * GIB))
        except ValueError as error:
            raise UserError(
                f"wired_limit_gb cannot be {settings.wired_limit_gb:g}.",
                why=str(error),
                do="use a smaller value",
            ) from error
    mx.reset_peak_memory()


def read_memory() -> Memory:
    return Memory(used_bytes=mx.get_active_memory(), peak_bytes=mx.get_peak_memory())


def free_memory() -> int:
    """Return the bytes that new arrays may use."""
    info = (mx.device_info if hasattr(mx, "device_info") else mx.metal.device_info)()
    largest = int(info.get("max_recommended_working_set_size") or 0)
    unused = psutil.virtual_memory().available
    return min(unused, largest - mx.get_active_memory()) if largest else unused


def memory_errors(*, doing: str = out_of_memory.STEP) -> contextlib.AbstractContextManager[None]:
    """Convert out-of-memory errors to OutOfMemory, after releasing cached memory."""
    return out_of_memory.memory_errors(doing=doing, release=mx.clear_cache)


@contextlib.contextmanager
def keep_process_state() -> Iterator[None]:
    """Restore the random state on exit."""
    state: Any = mx.random.state
    high, low = np.array(state[0]).tolist()
    try:
        yield
    finally:
        mx.random.seed(high << 32 | low)  # the key of a seed is its two halves
