"""Time the phases of a step: nested ones exclude each other, so that the phases add up to the step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Span:
    """A phase from its beginning to its end, in seconds of `time.perf_counter`."""

    name: str
    start: float
    end: float


@dataclass
class PhaseClock:
    """The time of the recorded steps, divided into phases."""

    synchronize: Callable[[], None] = lambda: None
    mark: Callable[[str], contextlib.AbstractContextManager[object]] = lambda name: contextlib.nullcontext()
    seconds: dict[str, float] = field(default_factory=dict)
    steps: dict[int, float] = field(default_factory=dict)
    """Step -> its wall time."""
    cpu_s: float = 0.0
    """CPU time of all threads of the process in the recorded steps."""
    spans: list[Span] = field(default_factory=list)
    _open: list[str] = field(default_factory=list)
    _since: float = 0.0

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Time a step as a whole."""
        self.synchronize()
        cpu, start = time.process_time(), time.perf_counter()
        with self.mark(f"step {number}"):
            yield
            self.synchronize()
        end = time.perf_counter()
        self.steps[number] = end - start
        self.cpu_s += time.process_time() - cpu
        self.spans.append(Span(f"step {number}", start, end))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; the phase around it pauses meanwhile."""
        self._switch()
        self._open.append(name)
        start = self._since
        try:
            with self.mark(name):
                yield
                self.synchronize()
        finally:
            self._switch()
            self._open.pop()
            self.spans.append(Span(name, start, self._since))

    def _switch(self) -> None:
        """Count the time since the last switch for the innermost phase."""
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now
