"""Track whether this process is connected to others, and end it without Python's shutdown if so.

A thread inside torch while the interpreter shuts down ends the process with "terminate called without an active
exception" and SIGABRT instead of its exit code. A process that leaves its group in order has no such thread; one that fails
cannot leave, since the others may wait for it in a collective.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import NoReturn

_CONNECTED = threading.Event()


def note_connected() -> None:
    _CONNECTED.set()


def note_left() -> None:
    _CONNECTED.clear()


def is_connected() -> bool:
    return _CONNECTED.is_set()


def end_at_once(code: int) -> NoReturn:
    """End this process with an exit code, after its output is written."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or it was closed
            stream.flush()
    os._exit(code)
