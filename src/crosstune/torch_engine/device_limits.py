"""Measure what a device reaches: the rate of a large matrix product, and the bandwidth of its memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from crosstune.core.profiling import Limits

BUDGET_S = 0.25
"""Time for each of the two measurements, after its warm-up."""
_SIZES = {"cpu": (64, 256, 768), "other": (4096,)}
_COPIED_BYTES = {"cpu": 64 << 20, "other": 512 << 20}
_SLOW = 1e9
"""A processor without arithmetic for a dtype does not reach this rate; its larger products would take minutes."""


def measure_limits(device: torch.device, dtype: torch.dtype) -> Limits | None:
    """Return the limits of a device, measured in half a second; None if it lacks the memory for that."""
    kind = "cpu" if device.type == "cpu" else "other"
    try:
        flops = max(_product_rates(device, dtype, _SIZES[kind]))
        bandwidth = _copy_rate(device, _COPIED_BYTES[kind])
    except RuntimeError as error:  # torch's out-of-memory errors, whatever the device
        if "memory" not in str(error).lower():
            raise
        return None
    return Limits(flops_per_s=flops, dtype=str(dtype).removeprefix("torch."), bytes_per_s=bandwidth)


def _product_rates(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> list[float]:
    rates = list[float]()
    # Gaussian numbers, as zeros need less power and let a GPU run faster than it does in training.
    generator = torch.Generator().manual_seed(0)
    for size in sizes:
        operand = torch.randn(size, size, generator=generator).to(device, dtype)
        product = torch.empty_like(operand)
        seconds = _seconds(lambda a=operand, out=product: torch.mm(a, a, out=out), device)  # type: ignore[misc]
        rates.append(2.0 * size**3 / seconds)
        if rates[-1] < _SLOW:
            break
    return rates


def _copy_rate(device: torch.device, num_bytes: int) -> float:
    """Return the bytes read and written in a second by a copy that fits into no cache."""
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _seconds(lambda: target.copy_(source), device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the shortest mean time of one call in a few rounds."""
    synchronize = torch.get_device_module(device).synchronize

    def timed(count: int) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(count):
            work()
        synchronize()
        return (time.perf_counter() - start) / count

    timed(1)  # loads kernels
    once = timed(1)
    count = max(1, round(BUDGET_S / 5 / max(once, 1e-7)))
    best, start = once, time.perf_counter()
    while time.perf_counter() - start < BUDGET_S:
        best = min(best, timed(count))
    return best
