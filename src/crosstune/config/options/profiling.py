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
    profile_with_stack: bool = option(False, "Record call stacks", aliases=("with_stack",), needs=(PROFILE,))
    profile_with_shapes: bool = option(
        False, "Record operator input shapes", aliases=("with_shapes",), needs=(PROFILE,)
    )
    profile_export_trace: bool = option(
        True, "Write a trace file", aliases=("export_trace",), needs=(PROFILE,)
    )
    profile_export_memory_timeline: bool = option(
        False, "Write a memory timeline", aliases=("export_memory_timeline",), needs=(PROFILE,)
    )
    profile_wait_steps: int = option(
        0,
        "Number of steps to wait in each cycle",
        low=0,
        high=10**9,
        aliases=("wait_steps",),
        needs=(PROFILE,),
    )
    profiler_warmup_steps: int = option(
        1, "Number of warm-up steps in each cycle", low=0, high=10**9, needs=(PROFILE,)
    )
    profile_active_steps: int = option(
        2,
        "Number of steps to record in each cycle",
        low=1,
        high=10**6,
        aliases=("active_steps",),
        needs=(PROFILE,),
    )
    profile_repeat: int = option(
        1,
        "Number of profiling cycles; 0 for no limit",
        low=0,
        high=10**6,
        aliases=("repeat",),
        needs=(PROFILE,),
    )
    profiling_frequency: int = option(
        10, "Begin a profiling cycle every N steps", low=1, high=10**9, needs=(PROFILE,)
    )
