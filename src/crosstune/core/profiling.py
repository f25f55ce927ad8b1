"""Define the interface between the loop and an engine for profiling training steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

DATA, FORWARD, BACKWARD, BOTH_PASSES = "data", "forward", "backward", "forward and backward"
COMMUNICATION, OPTIMIZER, CHECKPOINT, EVALUATION = "communication", "optimizer", "checkpoint", "evaluation"
PHASES = (DATA, FORWARD, BACKWARD, BOTH_PASSES, COMMUNICATION, OPTIMIZER, CHECKPOINT)
"""The phases of a step, in order. An engine that computes both passes at once has one phase for them."""

Phase = Callable[[str], contextlib.AbstractContextManager[None]]
"""Returns the context in which a phase is timed."""


def no_phase(name: str) -> contextlib.AbstractContextManager[None]:
    """Time nothing: the phase of a session that is not profiled."""
    return contextlib.nullcontext()


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    stacks: bool = False
    shapes: bool = False
    """True if operators are listed by the shapes of their inputs."""
    memory: bool = False
    memory_timeline: bool = False
    trace: bool = True


@dataclass(frozen=True, kw_only=True)
class Operator:
    name: str
    calls: int
    seconds: float
    """Self time, without called operators: on the device if there is one, otherwise on the CPU."""
    shapes: str = ""
    memory_bytes: int = 0
    """Bytes allocated and not freed, if memory is recorded."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The active steps of one cycle, as an engine recorded them."""

    operators: Sequence[Operator] = ()
    device_busy_s: float | None = None
    """Time in which the device computed or copied; None on a CPU or if unknown."""
    communication_s: float = 0.0
    """Time of collectives; they may overlap with other work."""
    flops: float | None = None
    """Floating-point operations of matmuls and attention; None if unknown."""
    memory_timeline: Sequence[tuple[float, int]] = ()
    """Seconds from the start, and the bytes allocated then."""
    files: Sequence[Path] = ()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The measured limits of the device."""

    flops_per_s: float
    """Measured with a large matmul."""
    dtype: str
    bytes_per_s: float
    """Bytes read and written per second when a large array is copied."""


class EngineProfiler(Protocol):
    """Records the work of an engine, in cycles of warm_up, start and stop. Most have a default for an engine without a profiler of
    operators."""

    def warm_up(self) -> None:
        """Prepare to record, outside of the first recorded step."""
        return

    def start(self) -> None:
        """Begin to record."""
        return

    def stop(
        self, folder: Path, *, step: int, evaluating: contextlib.AbstractContextManager[None]
    ) -> Recorded:
        """End a cycle whose first step is `step`; then, within `evaluating`, read its events and write its files."""
        return Recorded()

    def mark(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Name a block in the trace."""
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        """Wait for the device, so that a phase includes its work."""

    def measure_limits(self) -> Limits | None: ...


@runtime_checkable
class Profiles(Protocol):
    """A session that can be profiled."""

    phase: Phase
    """Times the phases of a step; replaced in recorded steps."""

    def profiler(self, settings: ProfileSettings) -> EngineProfiler: ...
