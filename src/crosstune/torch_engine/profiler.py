"""Record training steps with torch's profiler: operators, device time, allocations and a trace for a browser."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from crosstune.core.profiling import Limits, Operator, ProfileSettings, Recorded
from crosstune.torch_engine.count_flops import count_flops
from crosstune.torch_engine.device_limits import measure_limits

_MICROSECOND = 1e-6
_TRACED_DEVICES = ("cuda", "xpu")
_COLLECTIVES = ("c10d::", "nccl", "gloo:", "rccl", "oneccl")


class TorchProfiler:
    """Cycles of recorded steps on one device."""

    def __init__(self, device: torch.device, settings: ProfileSettings, *, dtype: torch.dtype) -> None:
        self.device, self.settings, self.dtype = device, settings, dtype
        self._recording: profile | None = None
        module = torch.get_device_module(device)
        self._synchronize = getattr(module, "synchronize", lambda: None)

    def warm_up(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.device.type in _TRACED_DEVICES:
            activities.append(getattr(ProfilerActivity, self.device.type.upper()))
        self._recording = profile(
            activities=activities,
            # Shapes are needed to count the operations of matrix products.
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

    def synchronize(self) -> None:
        self._synchronize()

    def stop(self, folder: Path, *, step: int) -> Recorded:
        assert self._recording is not None
        self.synchronize()
        recording, self._recording = self._recording, None
        with _without_messages():
            recording.stop_trace()
        events = list(recording.events() or ())
        files, timeline = self._write_files(recording, folder, step)
        operators = _operators(recording, by_shape=self.settings.shapes)
        collectives = [each.seconds for each in operators if each.name.lower().startswith(_COLLECTIVES)]
        return Recorded(
            operators=operators,
            device_busy_s=_busy_s(_device_events(events)) if self.device.type in _TRACED_DEVICES else None,
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
            recording.export_chrome_trace(str(plain))
        if self.settings.memory_timeline:
            timeline = memory_timeline(plain, self.device)
            times = folder / f"memory-step-{step:08d}.json"
            times.write_text(json.dumps({"seconds_and_bytes": timeline}), encoding="utf-8")
            files.append(times)
        if self.settings.trace:
            files.insert(0, _compress(plain))
        plain.unlink(missing_ok=True)
        if self.settings.memory and self.device.type == "cuda":
            snapshot = folder / f"memory-step-{step:08d}.pickle"
            torch.cuda.memory._dump_snapshot(str(snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)
            files.append(snapshot)
        return files, timeline


def _operators(recording: profile, *, by_shape: bool) -> list[Operator]:
    """Return the operators with their own time, on the device if it has any."""
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
            shapes=_shapes(each.input_shapes) if by_shape else "",
            memory_bytes=int(each.self_device_memory_usage if on_device else each.self_cpu_memory_usage),
        )
        for each in averages
    ]
    return [each for each in found if each.seconds > 0]


def _shapes(shapes: Any) -> str:
    return " ".join("x".join(map(str, shape)) for shape in shapes or () if shape)


def _device_events(events: Iterable[Any]) -> list[tuple[float, float]]:
    """Return the intervals of kernels and copies, in microseconds."""
    return [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type != torch.autograd.DeviceType.CPU
        and not getattr(event, "is_user_annotation", False)
    ]


def _busy_s(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of the intervals, which overlap where streams do."""
    covered, last = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, last))
        last = max(last, end)
    return covered * _MICROSECOND


def _compress(path: Path) -> Path:
    """Write a gzip copy, which trace viewers read directly; torch's own compression is several times slower."""
    target = path.with_suffix(".json.gz")
    with path.open("rb") as source, gzip.open(target, "wb", compresslevel=3) as file:
        shutil.copyfileobj(source, file, 1 << 20)
    return target


def memory_timeline(trace: Path, device: torch.device) -> list[tuple[float, int]]:
    """Return the allocated bytes over time from a trace; on a CPU, those since its start."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    on_cpu = device.type == "cpu"
    rows = sorted(
        (float(event["ts"]), int(event["args"].get("Total Allocated", 0)))
        for event in events
        # Device type 0 is the CPU, where the host's own tensors are also on a machine with a GPU.
        if event.get("name") == "[memory]" and (event["args"].get("Device Type") == 0) == on_cpu
    )
    return [(_MICROSECOND * (ts - rows[0][0]), allocated) for ts, allocated in rows]


@contextlib.contextmanager
def _without_messages() -> Iterator[None]:
    """Hide messages that the profiler's library prints to file descriptor 2."""
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
