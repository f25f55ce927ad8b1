"""Handle the stop signals, the output and the end of this process, count its cores, and measure time without suspensions.

A Python thread inside torch during interpreter shutdown aborts the process with SIGABRT. A process that fails cannot leave
its group, since others may wait for it in a collective, so it must exit without Python's shutdown.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

# SIGTERM: kill, schedulers. SIGHUP: a closed terminal or dropped connection. SIGUSR1: SLURM's `--signal=USR1@120` before a
# preemption or time limit. Windows has only the first two.
_STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1")
TRACKER_THREAD = "tracker "
"""Prefix of the names of trackers' threads."""
_CONNECTED = threading.Event()
_UNFINISHED = threading.Event()


def note_connected() -> None:
    _CONNECTED.set()


def note_left() -> None:
    _CONNECTED.clear()


def note_unfinished() -> None:
    """Note that threads and exit handlers of a library may never end."""
    _UNFINISHED.set()


def may_hang() -> bool:
    """Return True if Python's shutdown of this process may hang or abort."""
    return _CONNECTED.is_set() or _UNFINISHED.is_set()


def in_tracker_thread() -> bool:
    """Return True in the thread of a tracker, whose output is dropped and whose input is empty."""
    return threading.current_thread().name.startswith(TRACKER_THREAD)


def end_at_once(code: int) -> NoReturn:
    """Write the output and end this process with an exit code, without Python's shutdown."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader exited, or it was closed
            stream.flush()
    os._exit(code)


def stop_signals() -> list[signal.Signals]:
    return [signal.Signals[name] for name in _STOP_SIGNALS if hasattr(signal, name)]


def handled_signals() -> list[signal.Signals]:
    """Return the stop signals that this process does not ignore: `nohup` ignores SIGHUP, a shell's `&` SIGINT and SIGQUIT."""
    return [number for number in stop_signals() if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle the stop signals in the `with` block, then restore the former handlers."""
    previous = {number: signal.signal(number, handler) for number in handled_signals()}
    try:
        yield
    finally:
        for number, former in previous.items():
            signal.signal(number, former)


@contextlib.contextmanager
def hide_output() -> Iterator[None]:
    """Drop standard output and standard error in the `with` block. Errors must be raised."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def num_cores() -> int:
    """Return the number of cores that this process may use, within the limits of a container or taskset."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
