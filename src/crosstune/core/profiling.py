"""Define what the loop and an engine tell each other about a profile of training steps."""

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
"""Makes the block that is timed as a phase."""

_NOTHING = contextlib.nullcontext()


def no_phase(name: str) -> contextlib.AbstractContextManager[None]:
    """Time nothing: the phase of a session that is not profiled."""
    return _NOTHING


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    stacks: bool = False
    shapes: bool = False
    """Whether operators are listed by the shapes of their inputs."""
    memory: bool = False
    memory_timeline: bool = False
    trace: bool = True


@dataclass(frozen=True, kw_only=True)
class Operator:
    name: str
    calls: int
    seconds: float
    """On the device, or on the CPU if that computes; without the operators it calls."""
    shapes: str = ""
    memory_bytes: int = 0
    """Bytes that it allocated and did not free, where memory is recorded."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What an engine recorded of the active steps of one cycle."""

    operators: Sequence[Operator] = ()
    device_busy_s: float | None = None
    """Time in which the device computed or copied; None where the CPU computes or the engine cannot tell."""
    communication_s: float = 0.0
    """Time of collectives, which may overlap with other work."""
    flops: float | None = None
    """Floating-point operations of matrix products and attention; None where the engine cannot tell."""
    memory_timeline: Sequence[tuple[float, int]] = ()
    """Seconds from the start, and the bytes that are allocated then."""
    files: Sequence[Path] = ()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The measured limits of the device."""

    flops_per_s: float
    """Of a large matrix product."""
    dtype: str
    bytes_per_s: float
    """Read and written by a copy of a large array."""


class EngineProfiler(Protocol):
    """Records the work of an engine. Calls come in the order warm_up, start, stop, as often as there are cycles."""

    def warm_up(self) -> None:
        """Prepare to record, so that the first recorded step does not pay for it."""
        ...

    def start(self) -> None: ...

    def stop(self, folder: Path, *, step: int) -> Recorded:
        """End a cycle whose first step is `step`, and write its files."""
        ...

    def mark(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Name a block in the trace."""
        ...

    def synchronize(self) -> None:
        """Wait for the device, so that the time of a phase is that of its work."""
        ...

    def measure_limits(self) -> Limits | None: ...


@runtime_checkable
class Profiles(Protocol):
    """A session that can be profiled."""

    phase: Phase
    """Times the phases of a step; the loop replaces it in the steps that are recorded."""

    def profiler(self, settings: ProfileSettings) -> EngineProfiler: ...
