"""Set MLX's memory limits and decide whether steps are compiled."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import mlx.core as mx

from crosstune.config.mlx_settings import MlxSettings, read_mlx_settings
from crosstune.config.schema import Config
from crosstune.core import out_of_memory
from crosstune.core.errors import UserError
from crosstune.core.protocols import Memory

GIB = 1024**3


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


def memory_errors(*, doing: str = out_of_memory.STEP) -> contextlib.AbstractContextManager[None]:
    """Convert out-of-memory errors to OutOfMemory, after releasing cached memory."""
    return out_of_memory.memory_errors(doing=doing, release=mx.clear_cache)


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
