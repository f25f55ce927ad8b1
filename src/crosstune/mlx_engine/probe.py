"""Probe what MLX supports on this computer, and measure the speed of the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from crosstune.backends._host import memory_bytes, processor_device
from crosstune.core.backend import BackendSpec
from crosstune.core.profiling import EngineProfiler, Limits
from crosstune.estimate.machine import BackendReport, Device

if TYPE_CHECKING:
    import mlx.core as mx

BUDGET_S = 0.25
_SIZE = {"cpu": 512, "gpu": 4096}
_COPIED_BYTES = {"cpu": 64 << 20, "gpu": 512 << 20}


class MlxProfiler(EngineProfiler):
    """Record no operators: MLX has a profiler for them only in Xcode."""

    def __init__(self, *, dtype: mx.Dtype) -> None:
        self.dtype = dtype

    def synchronize(self) -> None:
        import mlx.core as mx

        mx.synchronize()

    def measure_limits(self) -> Limits | None:
        import mlx.core as mx

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
    import mlx.core as mx

    mx.eval(work())
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < BUDGET_S:
        before = time.perf_counter()
        mx.eval(work())
        best = min(best, time.perf_counter() - before)
    return best


_FAILURES = (ImportError, RuntimeError, ValueError, TypeError, AttributeError, OSError)
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_TOLERANCE = {"fp32": 2e-3, "fp16": 1e-2, "bf16": 5e-2}
_QUANTIZER = "mlx"
# Relative error of a matmul with a quantized weight: several times the error measured on Gaussian weights.
_QUANTIZED_TOLERANCE = {2: 0.8, 3: 0.4, 4: 0.2, 5: 0.15, 6: 0.1, 8: 0.05}
_COLLECTIVES = ("ring", "jaccl", "nccl", "mpi")

Notes = list[str]


def probe(spec: BackendSpec, *, quantizers: Sequence[str] = ()) -> BackendReport:
    """Probe MLX, and its quantizer if it is among `quantizers`."""
    notes: Notes = []
    reason, dtypes = _why_missing(), list[str]()
    if not reason:
        dtypes = [n for n in _DTYPES if _works(partial(_try_dtype, n), f"{n} does not work", notes)]
        reason = "" if "fp32" in dtypes else "; ".join(notes)
    if reason:
        return BackendReport(
            name=spec.name, engine=spec.engine, available=False, reason=reason, device=spec.device
        )
    import mlx.core as mx

    kind, device, unified = _device()
    if kind == "cpu":
        notes.append("MLX found no GPU and runs on the CPU, which is slow: use it for tests")
    bits = tuple(
        bits
        for bits in _QUANTIZED_TOLERANCE
        if _QUANTIZER in quantizers
        and _works(partial(_try_bits, bits), f"{bits}-bit mlx does not run", notes)
    )
    return BackendReport(
        name=spec.name,
        engine=spec.engine,
        available=True,
        device=kind,
        devices=(device,),
        unified_memory=unified,
        dtypes=tuple(dtypes),
        # MLX does not support bf16 arithmetic on a CPU: a measured speedup would be noise.
        bf16_speedup=_bf16_speedup() if kind == "gpu" and "bf16" in dtypes else 1.0,
        quantizers={_QUANTIZER: bits} if bits else {},
        collectives=tuple(name for name in _COLLECTIVES if mx.distributed.is_available(name)),
        attention=("sdpa",) if _works(_try_attention, "attention does not run", notes) else (),
        notes=tuple(notes),
    )


def _why_missing() -> str:
    """Return why MLX cannot be used, or an empty string if it can."""
    try:
        import mlx.core  # noqa: F401
    except ModuleNotFoundError as error:
        missing = error.name is not None and error.name.partition(".")[0] == "mlx"
        return "mlx is not installed" if missing else f"mlx does not import: {error}"
    except (ImportError, OSError) as error:
        return f"mlx does not import: {error}"
    return ""


def _works(trial: Callable[[], None], what: str, notes: Notes) -> bool:
    try:
        trial()
    except _FAILURES as error:
        lines = str(error).strip().splitlines()
        notes.append(f"{what}: {lines[0] if lines else type(error).__name__}")
        return False
    return True


def _device() -> tuple[str, Device, bool]:
    """Return gpu or cpu, the device, and whether it shares the system's memory."""
    import mlx.core as mx

    if mx.default_device().type != mx.DeviceType.gpu:
        return "cpu", processor_device(), False
    info = (mx.device_info if hasattr(mx, "device_info") else mx.metal.device_info)()
    system_total, system_free = memory_bytes()
    unified = bool(mx.metal.is_available())
    # Metal reports a recommended limit for the process; CUDA reports the memory of the card.
    total = int(info.get("max_recommended_working_set_size") or info.get("total_memory") or system_total)
    free = int(info.get("free_memory") or total - mx.get_active_memory())
    if unified:
        free = min(free, system_free)
    name = str(info.get("device_name") or info.get("architecture") or "gpu")
    return "gpu", Device(name=name, memory_total_bytes=total, memory_free_bytes=free), unified


def _try_dtype(name: str) -> None:
    """Compare a matmul and its gradients with float64 in numpy."""
    import mlx.core as mx

    dtype = getattr(mx, _DTYPES[name])
    random = np.random.default_rng(0)
    left, right, weight = (
        mx.array(random.standard_normal((48, 48), dtype=np.float32)).astype(dtype) for _ in "abc"
    )
    gradients = mx.grad(lambda a, b: ((a @ b) * weight).astype(mx.float32).sum(), argnums=(0, 1))(left, right)
    a, b, w = (_to_numpy(item) for item in (left, right, weight))
    pairs = zip((left @ right, *gradients), (a @ b, w @ b.T, a.T @ w), strict=True)
    for result, reference in pairs:
        error = float(np.abs(_to_numpy(result) - reference).max() / np.abs(reference).max())
        if not error <= _TOLERANCE[name]:
            raise ValueError(f"a small matmul differs from float64 by {error:.1%}")


def _try_bits(bits: int) -> None:
    """Quantize a weight, multiply by it, and take the gradient with respect to the input."""
    import mlx.core as mx

    random = np.random.default_rng(0)
    weight = mx.array(random.standard_normal((128, 128), dtype=np.float32))
    inputs = mx.array(random.standard_normal((8, 128), dtype=np.float32))
    packed = mx.quantize(weight, group_size=64, bits=bits)

    def product(x: Any) -> Any:
        return mx.quantized_matmul(x, *packed, transpose=True, group_size=64, bits=bits)

    gradient = _to_numpy(mx.grad(lambda x: product(x).square().sum())(inputs))
    restored = _to_numpy(mx.dequantize(*packed, group_size=64, bits=bits))
    reference = _to_numpy(inputs) @ _to_numpy(weight).T
    error = np.linalg.norm(_to_numpy(product(inputs)) - reference) / np.linalg.norm(reference)
    if not (np.isfinite(gradient).all() and np.isfinite(restored).all()):
        raise ValueError("a result or its gradient is not finite")
    if error > _QUANTIZED_TOLERANCE[bits]:
        raise ValueError(f"a small matmul is off by {error:.0%}")


def _try_attention() -> None:
    import mlx.core as mx

    queries = mx.array(np.random.default_rng(0).standard_normal((1, 4, 32, 64), dtype=np.float32))

    def attend(x: Any) -> Any:
        return mx.fast.scaled_dot_product_attention(x, x, x, scale=0.125, mask="causal").square().sum()

    if not np.isfinite(_to_numpy(mx.grad(attend)(queries))).all():
        raise ValueError("the gradient is not finite")


def _bf16_speedup(size: int = 2048) -> float:
    """Return the time of an fp32 matmul divided by the time of a bf16 matmul."""
    import mlx.core as mx

    wide = mx.array(np.random.default_rng(0).standard_normal((size, size), dtype=np.float32))
    narrow = wide.astype(mx.bfloat16)
    return round(shortest_s(lambda: wide @ wide) / shortest_s(lambda: narrow @ narrow), 2)


def _to_numpy(value: Any) -> Any:
    import mlx.core as mx

    return np.array(value.astype(mx.float32)).astype(np.float64)
