"""Options of the profiler."""

from __future__ import annotations

from dataclasses import dataclass

from crosstune.config.conditions import PROFILE
from crosstune.config.option import Holds, option


@dataclass(frozen=True, kw_only=True)
class ProfilingOptions:
    profile: bool = option(False, "Profile the training steps")
    profiling_output: str = option(
        "profiles",
        "Folder for profiles; in the run folder unless it is given",
        needs=(PROFILE,),
        holds=Holds.PATH,
    )
    profile_memory: bool = option(False, "Record memory allocations of the first steps")
    with_stack: bool = option(False, "Record call stacks", needs=(PROFILE,))
    with_shapes: bool = option(False, "Record operator input shapes", needs=(PROFILE,))
    export_trace: bool = option(True, "Write a trace file", needs=(PROFILE,))
    export_memory_timeline: bool = option(False, "Write a memory timeline", needs=(PROFILE,))
    wait_steps: int = option(0, "Number of steps to skip at first", low=0, high=10**9, needs=(PROFILE,))
    profiler_warmup_steps: int = option(
        1, "Number of warm-up steps of the profiler", low=0, high=10**9, needs=(PROFILE,)
    )
    active_steps: int = option(2, "Number of steps to record", low=1, high=10**6, needs=(PROFILE,))
    repeat: int = option(1, "Number of profiling cycles; 0 for no limit", low=0, high=10**6, needs=(PROFILE,))
    profiling_frequency: int = option(
        10, "Begin a profiling cycle every N steps", low=1, high=10**9, needs=(PROFILE,)
    )
