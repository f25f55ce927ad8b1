"""Measure time without suspensions of this process (Ctrl-Z, SIGSTOP, a scheduler).

Time limits use it: a job that continues after a suspension does not hang.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

GAP_S = 3.0
"""A longer gap between two readings may be a suspension."""
_BUSY_SHARE = 0.1
"""A process that used this share of a gap as CPU time was not suspended: its threads waited for each other."""


class ActiveClock:
    """A clock that stops while this process is suspended. Callers must read it about every second."""

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
        """Return seconds since an arbitrary moment."""
        with self._lock:
            wall, cpu = self._wall(), self._cpu()
            gap_s = wall - self._last_wall
            if gap_s > GAP_S and cpu - self._last_cpu < _BUSY_SHARE * gap_s:
                self._suspended_s += gap_s
            self._last_wall, self._last_cpu = wall, cpu
            return wall - self._suspended_s
