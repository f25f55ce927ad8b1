"""End a process without Python's shutdown where that may hang or abort.

A Python thread inside torch during interpreter shutdown aborts the process with SIGABRT, whatever its exit code. A process
that left its group has no such thread; one that fails cannot leave, since others may wait for it in a collective.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import NoReturn

_CONNECTED = threading.Event()
_UNFINISHED = threading.Event()


def note_connected() -> None:
    _CONNECTED.set()


def note_left() -> None:
    _CONNECTED.clear()


def note_unfinished() -> None:
    """Note that a library was given up: its threads and exit handlers may never end."""
    _UNFINISHED.set()


def may_hang() -> bool:
    """Return whether Python's shutdown of this process may hang or abort."""
    return _CONNECTED.is_set() or _UNFINISHED.is_set()


def end_at_once(code: int) -> NoReturn:
    """End this process with an exit code, after its output is written."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or it was closed
            stream.flush()
    os._exit(code)
