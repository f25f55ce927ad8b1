"""Provide the micro-batches of each step: prepared in a thread while the current step is computed, or generated."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from crosstune.core.events import Observer
from crosstune.core.protocols import GeneratesBatches, PreparedBatch, Recipe, Session
from crosstune.loop.step import prepare_window
from crosstune.loop.stop import StopSignal

DEPTH = 3
"""Steps prepared ahead."""


class Prefetch:
    """The prepared micro-batches of a run from step `first` on. An error is raised when its step is requested."""

    def __init__(self, recipe: Recipe, session: Session, *, first: int) -> None:
        self._recipe, self._session = recipe, session
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._ahead: deque[Future[Sequence[PreparedBatch]]] = deque()
        self._steps = iter(range(first, recipe.num_steps()))
        for _ in range(DEPTH):
            self._prepare_next()

    def micro_batches(self) -> Sequence[PreparedBatch]:
        """Return the micro-batches of the next step."""
        window = self._ahead.popleft().result()
        self._prepare_next()
        return window

    def close(self) -> None:
        """End the thread and drop its prepared steps."""
        self._pool.shutdown(cancel_futures=True)
        self._ahead.clear()

    def _prepare_next(self) -> None:
        if (step := next(self._steps, None)) is not None:
            self._ahead.append(self._pool.submit(self._prepare, step))

    def _prepare(self, step: int) -> Sequence[PreparedBatch]:
        return prepare_window(self._session, self._recipe.micro_batches(step))


class Generation:
    """The micro-batches of a run from step `first` on, generated with the current weights when a step begins."""

    def __init__(
        self, recipe: GeneratesBatches, session: Session, *, first: int, observer: Observer, stop: StopSignal
    ) -> None:
        self._recipe, self._session, self._observer, self._stop = recipe, session, observer, stop
        self._steps = iter(range(first, recipe.num_steps()))

    def micro_batches(self) -> Sequence[PreparedBatch]:
        with self._stop.interruptible():  # generating may take long
            batches = self._recipe.make_batches(self._session, next(self._steps), observer=self._observer)
            return prepare_window(self._session, batches)

    def close(self) -> None:
        """Nothing runs in the background."""
