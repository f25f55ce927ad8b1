"""Set MLX's memory limits and decide whether steps are compiled."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from crosstune.config.mlx_settings import MlxSettings, read_mlx_settings
from crosstune.config.schema import Config
from crosstune.core.errors import OutOfMemory, UserError
from crosstune.core.protocols import Memory

GIB = 1024**3
_OUT_OF_MEMORY = re.compile(
    r"insufficient memory|out ?of ?memory|unable to allocate|attempting to allocate", re.I
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    compiled: bool
    num_layers: int | None = None
    """Number of last layers that get adapters; None for all."""


def set_limits(config: Config) -> Limits:
    """Apply --mlx_config. Steps are compiled on GPUs only: on a CPU each new shape calls a C++ compiler."""
    settings = read_mlx_settings(config.mlx_config)
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    _apply(settings)
    mx.reset_peak_memory()
    compiled = on_gpu if settings.compile is None else settings.compile
    return Limits(compiled=compiled, num_layers=settings.num_layers)


def read_memory() -> Memory:
    return Memory(used_bytes=mx.get_active_memory(), peak_bytes=mx.get_peak_memory())


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Convert out-of-memory errors to OutOfMemory. MLX has no exception for them, so they are recognized by the messages
    of Metal, CUDA and its allocator."""
    try:
        yield
    except RuntimeError as error:
        if not _OUT_OF_MEMORY.search(str(error)):
            raise
        mx.clear_cache()
        raise OutOfMemory(str(error).strip().splitlines()[0]) from error


def _apply(settings: MlxSettings) -> None:
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
