"""Stop after the current step on Ctrl-C or a signal; a second Ctrl-C stops immediately."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from crosstune.process.this_process import handled_signals


class StopRequested(Exception):
    """Raised during work that can be interrupted without loss, such as an evaluation."""


class StopSignal:
    """A pending request to stop. In a multi-process run (`shared`) no work is interrupted: other ranks would wait for it."""

    def __init__(self, *, shared: bool = False) -> None:
        self.reason = ""
        self.shared = shared
        self._droppable = False

    @property
    def requested(self) -> bool:
        return bool(self.reason)

    def request(self, reason: str) -> None:
        """Request a stop after the current step; an earlier reason is kept."""
        self.reason = self.reason or reason

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopSignal]:
        """Handle the stop signals in the `with` block. Python allows this only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        previous = {number: signal.signal(number, self._on_signal) for number in handled_signals()}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raise StopRequested as soon as a signal arrives. The context must not change the model."""
        if self.shared:
            yield
            return
        if self.requested:
            raise StopRequested(self.reason)
        self._droppable = True
        try:
            yield
        finally:
            self._droppable = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.reason = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if self._droppable:
            raise StopRequested(self.reason)
