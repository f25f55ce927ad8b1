"""Record training steps with torch's profiler, and measure the limits of the device."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from crosstune.core.profiling import Limits, Operator, ProfileSettings, Recorded
from crosstune.files.atomic_files import staging_folder
from crosstune.torch_engine.capabilities import mean_s

_MICROSECOND = 1e-6
_TRACED_DEVICES = ("cuda", "xpu")
_COLLECTIVES = ("c10d::", "nccl", "gloo:", "rccl", "oneccl")
BUDGET_S = 0.25
"""Seconds for each of the two measurements, after its warm-up."""
_SIZES = {"cpu": (64, 256, 768), "other": (4096,)}
_COPIED_BYTES = {"cpu": 64 << 20, "other": 512 << 20}
_SLOW = 1e9
"""Below this rate a processor has no arithmetic for the dtype, and larger matmuls would take minutes."""
_BACKWARD_FACTOR = 2.5
"""The backward pass of fused attention has five matmuls, the forward pass two."""
_FIRST_FACTOR = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::_scaled_mm": 0,
    "aten::_int_mm": 0,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
}
"""Operator -> the position of its left factor; the right one follows."""
_ATTENTION = "aten::_scaled_dot_product_"


class TorchProfiler:
    """Records cycles of steps on one device."""

    def __init__(self, device: torch.device, settings: ProfileSettings, *, dtype: torch.dtype) -> None:
        self.device, self.settings, self.dtype = device, settings, dtype
        self._recording: profile | None = None
        self.synchronize = getattr(torch.get_device_module(device), "synchronize", lambda: None)

    def warm_up(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.device.type in _TRACED_DEVICES:
            activities.append(getattr(ProfilerActivity, self.device.type.upper()))
        self._recording = profile(
            activities=activities,
            # Shapes are needed to count the operations of matmuls.
            record_shapes=True,
            profile_memory=self.settings.memory,
            with_stack=self.settings.stacks,
        )
        with _without_messages():
            self._recording.prepare_trace()

    def start(self) -> None:
        assert self._recording is not None
        if self.settings.memory and self.device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        with _without_messages():
            self._recording.start_trace()

    def mark(self, name: str) -> contextlib.AbstractContextManager[None]:
        return record_function(name)

    def stop(
        self, folder: Path, *, step: int, evaluating: contextlib.AbstractContextManager[None]
    ) -> Recorded:
        assert self._recording is not None
        self.synchronize()
        recording, self._recording = self._recording, None
        with _without_messages():
            recording.stop_trace()
        with evaluating:
            return self._evaluate(recording, folder, step)

    def _evaluate(self, recording: profile, folder: Path, step: int) -> Recorded:
        events = list(recording.events() or ())
        with staging_folder(folder / "trace") as stage:
            written, timeline = self._write_files(recording, stage, step)
            files = [path.rename(folder / path.name) for path in written]
        operators = _operators(recording, by_shape=self.settings.shapes)
        collectives = [each.seconds for each in operators if each.name.lower().startswith(_COLLECTIVES)]
        return Recorded(
            operators=operators,
            device_busy_s=_busy_s(events) if self.device.type in _TRACED_DEVICES else None,
            communication_s=sum(collectives),
            flops=float(sum(count_flops(event.name, event.input_shapes) for event in events)),
            memory_timeline=timeline,
            files=files,
        )

    def measure_limits(self) -> Limits | None:
        return measure_limits(self.device, self.dtype)

    def _write_files(
        self, recording: profile, folder: Path, step: int
    ) -> tuple[list[Path], list[tuple[float, int]]]:
        """Write the requested files: the trace, the memory timeline and, on CUDA, the snapshot of the allocator."""
        files, timeline = list[Path](), list[tuple[float, int]]()
        plain = folder / f"trace-step-{step:08d}.json"
        if self.settings.trace or self.settings.memory_timeline:
            with _without_messages():
                recording.export_chrome_trace(str(plain))
            if not plain.is_file():  # torch only prints the error, and leaves a file with another name
                raise OSError(f"torch cannot write {plain.name}: the disk is full or a limit was reached")
        if self.settings.memory_timeline:
            timeline = memory_timeline(plain, self.device)
            times = folder / f"memory-step-{step:08d}.json"
            times.write_text(json.dumps({"seconds_and_bytes": timeline}), encoding="utf-8")
            files.append(times)
        if self.settings.trace:
            # A gzip copy for trace viewers; torch's own compression is several times slower.
            files.insert(0, plain.with_suffix(".json.gz"))
            with plain.open("rb") as source, gzip.open(files[0], "wb", compresslevel=3) as file:
                shutil.copyfileobj(source, file, 1 << 20)
        if self.settings.memory and self.device.type == "cuda":
            snapshot = folder / f"memory-step-{step:08d}.pickle"
            torch.cuda.memory._dump_snapshot(str(snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)
            files.append(snapshot)
        return files, timeline


def _operators(recording: profile, *, by_shape: bool) -> list[Operator]:
    """Return the operators with their own time: on the device if it was traced, else on the host."""
    averages = [
        each
        for each in recording.key_averages(group_by_input_shape=by_shape)
        if not getattr(each, "is_user_annotation", False)
    ]
    on_device = any(each.self_device_time_total > 0 for each in averages)
    found = [
        Operator(
            name=each.key,
            calls=each.count,
            seconds=_MICROSECOND * (each.self_device_time_total if on_device else each.self_cpu_time_total),
            shapes=" ".join("x".join(map(str, shape)) for shape in each.input_shapes or () if shape)
            if by_shape
            else "",
            memory_bytes=int(each.self_device_memory_usage if on_device else each.self_cpu_memory_usage),
        )
        for each in averages
    ]
    return [each for each in found if each.seconds > 0]


def _busy_s(events: Iterable[Any]) -> float:
    """Return the time in which kernels or copies run on the device."""
    covered, last = 0.0, float("-inf")
    intervals = (
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type != torch.autograd.DeviceType.CPU
        and not getattr(event, "is_user_annotation", False)
    )
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, last))
        last = max(last, end)
    return covered * _MICROSECOND


def memory_timeline(trace: Path, device: torch.device) -> list[tuple[float, int]]:
    """Return the allocated bytes over time from a trace; on a CPU, since the start of the trace."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    on_cpu = device.type == "cpu"
    rows = sorted(
        (float(event["ts"]), int(event["args"].get("Total Allocated", 0)))
        for event in events
        # Device type 0 is the CPU.
        if event.get("name") == "[memory]" and (event["args"].get("Device Type") == 0) == on_cpu
    )
    return [(_MICROSECOND * (ts - rows[0][0]), allocated) for ts, allocated in rows]


@contextlib.contextmanager
def _without_messages() -> Iterator[None]:
    """Hide the messages that the profiler prints to file descriptor 2."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def count_flops(name: str, shapes: Sequence[Sequence[int]] | None) -> float:
    """Return the operations of one call; 0 for operators without matmuls, or whose matmuls are counted below them.

    The masked half of causal attention counts in full, as in published figures.
    """
    if name in _FIRST_FACTOR:
        first, factor, dim = _FIRST_FACTOR[name], 2.0, -1
    elif name.startswith(_ATTENTION) and "math" not in name:  # q @ k and weights @ v, for one head size
        first, factor, dim = (1, 4.0 * _BACKWARD_FACTOR, -2) if name.endswith("_backward") else (0, 4.0, -2)
    else:
        return 0.0
    factors = (shapes or ())[first : first + 2]
    if len(factors) < 2 or min(map(len, factors)) < 1 - dim:
        return 0.0
    return factor * math.prod(factors[0]) * factors[1][dim]


def measure_limits(device: torch.device, dtype: torch.dtype) -> Limits | None:
    """Measure the limits of a device in half a second; return None if it lacks the memory."""
    kind = "cpu" if device.type == "cpu" else "other"
    try:
        flops = _matmul_rate(device, dtype, _SIZES[kind])
        bandwidth = _copy_rate(device, _COPIED_BYTES[kind])
    except RuntimeError as error:  # every device has its own out-of-memory error
        if "memory" not in str(error).lower():
            raise
        return None
    return Limits(flops_per_s=flops, dtype=str(dtype).removeprefix("torch."), bytes_per_s=bandwidth)


def _matmul_rate(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> float:
    best = 0.0
    # Gaussian numbers: with zeros a GPU needs less power and runs faster than in training.
    generator = torch.Generator().manual_seed(0)
    for size in sizes:
        operand = torch.randn(size, size, generator=generator).to(device, dtype)
        product = torch.empty_like(operand)
        seconds = _seconds(lambda a=operand, out=product: torch.mm(a, a, out=out), device)  # type: ignore[misc]
        rate = 2.0 * size**3 / seconds
        best = max(best, rate)
        if rate < _SLOW:
            break
    return best


def _copy_rate(device: torch.device, num_bytes: int) -> float:
    """Return the bytes per second that a copy reads and writes, larger than any cache."""
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _seconds(lambda: target.copy_(source), device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the shortest mean time of a call over several rounds."""
    mean_s(work, device)  # loads kernels
    once = mean_s(work, device)
    count = max(1, round(BUDGET_S / 5 / max(once, 1e-7)))
    best, start = once, time.perf_counter()
    while time.perf_counter() - start < BUDGET_S:
        best = min(best, mean_s(work, device, count))
    return best
