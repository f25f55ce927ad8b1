"""Measure time without suspensions of this process by Ctrl-Z, SIGSTOP or a scheduler."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

TICK_S = 0.5
GAP_S = 3.0
"""A gap between two looks that is longer than this may be a suspension."""
_BUSY_SHARE = 0.1
"""A process that used this share of a gap as CPU time was not suspended: its threads waited for each other."""


class ActiveClock:
    """A clock that stands still while this process is suspended. It has to be looked at every second or so."""

    def __init__(
        self,
        *,
        wall: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self._wall, self._cpu = wall, cpu
        self._last_wall, self._last_cpu = wall(), cpu()
        self._suspended_s = 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        """Return seconds since some moment."""
        with self._lock:
            wall, cpu = self._wall(), self._cpu()
            gap_s = wall - self._last_wall
            if gap_s > GAP_S and cpu - self._last_cpu < _BUSY_SHARE * gap_s:
                self._suspended_s += gap_s
            self._last_wall, self._last_cpu = wall, cpu
            return wall - self._suspended_s

    @contextlib.contextmanager
    def ticking(self) -> Iterator[None]:
        """Look at the clock in a thread, while this one may be busy for longer."""
        done = threading.Event()

        def tick() -> None:
            while not done.wait(TICK_S):
                self.now()

        thread = threading.Thread(target=tick, daemon=True, name="crosstune-clock")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
