"""Handle the stop signals, the output and the end of this process.

A Python thread inside torch during interpreter shutdown aborts the process with SIGABRT. A process that left its group has
no such thread. One that fails cannot leave, since others may wait for it in a collective, and must end without Python's
shutdown.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

# SIGTERM: kill, schedulers. SIGHUP: a closed terminal or dropped connection. SIGUSR1: SLURM's `--signal=USR1@120` before a
# preemption or time limit. Windows has only the first two.
_STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1")
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
    """Return whether Python's shutdown of this process may hang or abort."""
    return _CONNECTED.is_set() or _UNFINISHED.is_set()


def end_at_once(code: int) -> NoReturn:
    """Write the output and end this process with an exit code, without Python's shutdown."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader is gone, or it was closed
            stream.flush()
    os._exit(code)


def stop_signals() -> list[signal.Signals]:
    return [signal.Signals[name] for name in _STOP_SIGNALS if hasattr(signal, name)]


def taken_signals() -> list[signal.Signals]:
    """Return the stop signals that this process does not ignore: `nohup` ignores SIGHUP, a shell's `&` SIGINT and
    SIGQUIT."""
    return [number for number in stop_signals() if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle the stop signals inside the block; restore the former handlers at its end."""
    previous = {number: signal.signal(number, handler) for number in taken_signals()}
    try:
        yield
    finally:
        for number, former in previous.items():
            signal.signal(number, former)


@contextlib.contextmanager
def hide_output() -> Iterator[None]:
    """Drop standard output and standard error inside the block. Errors must be raised."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
