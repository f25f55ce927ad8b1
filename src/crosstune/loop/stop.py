"""Ctrl-C and SIGTERM as a wish to stop: the step in progress is finished first; a second Ctrl-C stops at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class StopRequested(Exception):
    """Raised where work may be dropped without loss, such as in an evaluation."""


class StopSignal:
    """With several processes (`shared`) nothing is dropped at once: one alone would leave the others waiting for it."""

    def __init__(self, *, shared: bool = False) -> None:
        self.reason = ""
        self._shared = shared
        self._droppable = False

    @property
    def requested(self) -> bool:
        return bool(self.reason)

    def request(self, reason: str) -> None:
        """Ask for a stop at the end of the step; a reason that is there already stays."""
        self.reason = self.reason or reason

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopSignal]:
        """Take over the signals for as long as the run lasts. Only the main thread may do that."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        previous = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def droppable(self) -> Iterator[None]:
        """Inside, a signal raises StopRequested at once: nothing there changes the model."""
        if self._shared:
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
