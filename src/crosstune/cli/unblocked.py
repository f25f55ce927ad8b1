"""Write to a terminal from a thread, so that one that takes no text (Ctrl-S, a stalled connection) stops no training."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from typing import Any, TextIO

MOST_WAITING = 500
"""Pieces of text that may wait; what comes when so many do is dropped."""
DRAIN_S = 2.0


class UnblockedStream:
    """A terminal's stream whose writes return at once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._waiting: queue.Queue[bytes] = queue.Queue(maxsize=MOST_WAITING)
        # The thread writes to a descriptor of its own: blocked in Python's buffer, it would block the end of the process.
        self._descriptor = os.dup(stream.fileno())
        threading.Thread(target=self._write_all, name="terminal", daemon=True).start()

    def write(self, text: str) -> int:
        encoded = text.replace("\n", os.linesep).encode(self._stream.encoding or "utf-8", "backslashreplace")
        with contextlib.suppress(queue.Full):  # nobody reads it
            self._waiting.put_nowait(encoded)
        return len(text)

    def flush(self) -> None:
        return None  # the thread leaves nothing in a buffer

    def drain(self, *, seconds: float = DRAIN_S) -> None:
        """Wait until everything is written, but not longer than this."""
        end = time.monotonic() + seconds
        while self._waiting.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.005)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _write_all(self) -> None:
        lost = False
        while True:
            text = self._waiting.get()
            while text and not lost:
                try:
                    text = text[os.write(self._descriptor, text) :]
                except OSError:  # the terminal is gone, and with it its reader
                    lost = True
            self._waiting.task_done()


def unblocked(stream: TextIO) -> TextIO:
    """Return a stream whose writes do not wait for a terminal; any other stream as it is."""
    if not stream.isatty():
        return stream
    return UnblockedStream(stream)  # type: ignore[return-value]
