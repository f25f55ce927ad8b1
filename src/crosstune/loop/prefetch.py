"""Prepare the micro-batches of the next steps in a thread, while the current step is computed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from crosstune.core.protocols import PreparedBatch, Recipe, Session
from crosstune.loop.step import prepare_window

DEPTH = 2
"""Steps prepared ahead."""


class Prefetch:
    """The prepared micro-batches of a run from step `first` on, in order. An error in preparing a step is raised when the
    step is requested."""

    def __init__(self, recipe: Recipe, session: Session, *, first: int) -> None:
        self._recipe, self._session = recipe, session
        self._queue: queue.Queue[tuple[int, Sequence[PreparedBatch], BaseException | None]] = queue.Queue(
            maxsize=DEPTH
        )
        self._closed = threading.Event()
        steps = range(first, recipe.num_steps())
        self._thread = threading.Thread(target=self._prepare_all, args=(steps,), name="prefetch", daemon=True)
        self._thread.start()

    def micro_batches(self, step: int) -> Sequence[PreparedBatch]:
        """Return the micro-batches of a step; steps must be requested in order."""
        number, window, error = self._queue.get()
        if error is not None:
            raise error
        assert number == step, f"step {step} was requested, but step {number} is next"
        return window

    def close(self) -> None:
        """End the thread and drop its prepared steps."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(timeout=0.01)

    def _prepare_all(self, steps: range) -> None:
        for step in steps:
            if self._closed.is_set():
                return
            try:
                window = prepare_window(self._session, self._recipe.micro_batches(step))
            except BaseException as error:  # noqa: BLE001  (raised again in the thread of the loop)
                self._queue.put((step, (), error))
                return
            self._queue.put((step, window, None))
