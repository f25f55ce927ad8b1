"""Profile steps on MLX: measure the speed of the device. The loop times the phases of a step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from crosstune.core.profiling import Limits, ProfileSettings, Recorded

BUDGET_S = 0.25
_SIZE = {"cpu": 512, "gpu": 4096}
_COPIED_BYTES = {"cpu": 64 << 20, "gpu": 512 << 20}


class MlxProfiler:
    """Record no operators: MLX has a profiler for them only in Xcode."""

    def __init__(self, settings: ProfileSettings, *, dtype: mx.Dtype) -> None:
        self.settings, self.dtype = settings, dtype

    def warm_up(self) -> None:
        return None

    def start(self) -> None:
        return None

    def stop(
        self, folder: Path, *, step: int, evaluating: contextlib.AbstractContextManager[None]
    ) -> Recorded:
        return Recorded()

    def mark(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        mx.synchronize()

    def measure_limits(self) -> Limits | None:
        kind = "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu"
        size, num_bytes = _SIZE[kind], _COPIED_BYTES[kind]
        key = mx.random.key(0)
        operand = mx.random.normal((size, size), key=key).astype(self.dtype)
        source = mx.ones((num_bytes // 4,))
        mx.eval(operand, source)
        return Limits(
            flops_per_s=2.0 * size**3 / shortest_s(lambda: operand @ operand),
            dtype=str(self.dtype).removeprefix("mlx.core."),
            bytes_per_s=2 * num_bytes / shortest_s(lambda: source + 1),
        )


def shortest_s(work: Callable[[], mx.array]) -> float:
    """Return the shortest time of one call."""
    mx.eval(work())
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < BUDGET_S:
        before = time.perf_counter()
        mx.eval(work())
        best = min(best, time.perf_counter() - before)
    return best
