"""Options of the profiler."""

from __future__ import annotations

from dataclasses import dataclass

from crosstune.config.conditions import PROFILE
from crosstune.config.option import Holds, option
from crosstune.config.unbuilt import PROFILER


@dataclass(frozen=True, kw_only=True)
class ProfilingOptions:
    profile: bool = option(False, "Profile the training steps", unbuilt=PROFILER)
    profiling_output: str = option(
        "profiles", "Folder for profiles", needs=(PROFILE,), unbuilt=PROFILER, holds=Holds.PATH
    )
    profile_memory: bool = option(False, "Record memory allocations of the first steps", unbuilt=PROFILER)
    with_stack: bool = option(False, "Record call stacks", needs=(PROFILE,), unbuilt=PROFILER)
    with_shapes: bool = option(False, "Record operator input shapes", needs=(PROFILE,), unbuilt=PROFILER)
    export_trace: bool = option(True, "Write a trace file", needs=(PROFILE,), unbuilt=PROFILER)
    export_memory_timeline: bool = option(
        False, "Write a memory timeline", needs=(PROFILE,), unbuilt=PROFILER
    )
    wait_steps: int = option(
        0, "Number of steps to skip at first", low=0, high=10**9, needs=(PROFILE,), unbuilt=PROFILER
    )
    profiler_warmup_steps: int = option(
        1, "Number of warm-up steps of the profiler", low=0, high=10**9, needs=(PROFILE,), unbuilt=PROFILER
    )
    active_steps: int = option(
        2, "Number of steps to record", low=1, high=10**6, needs=(PROFILE,), unbuilt=PROFILER
    )
    repeat: int = option(
        0, "Number of profiling cycles; 0 for no limit", low=0, high=10**6, needs=(PROFILE,), unbuilt=PROFILER
    )
    profiling_frequency: int = option(
        10, "Profile every N steps", low=1, high=10**9, needs=(PROFILE,), unbuilt=PROFILER
    )
