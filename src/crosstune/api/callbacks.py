"""Call the program's callbacks for steps and events; a callback can stop the run."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeAlias

from crosstune.core.errors import UserError
from crosstune.core.events import Event, StepMetrics
from crosstune.loop.stop import StopSignal


class _Stop:
    def __repr__(self) -> str:
        return "crosstune.STOP"


STOP: Final = _Stop()
"""Returned by a callback to stop the run after the current step."""


class StopTraining(Exception):
    """Raised by a callback to stop the run after the current step, with a reason for its record."""


class ObservesSteps(Protocol):
    def on_step(self, metrics: Any, /) -> object: ...


class ObservesEvents(Protocol):
    def on_event(self, event: Any, /) -> object: ...


Callback: TypeAlias = ObservesSteps | ObservesEvents | Callable[[Any], object]
"""An object with `on_step(metrics)`, `on_event(event)` or both, or a function of the metrics of each step.

Metrics are a `StepMetrics`; events are the classes in `crosstune.core.events`."""

_METHODS = ("on_step", "on_event")

Functions = dict[str, Callable[[Any], object]]
"""Observer method -> function of a callback."""


class Callbacks:
    """An observer that calls the program's callbacks.

    After an error in a callback, the run stops at the end of the step and saves a checkpoint; then the error is raised.
    """

    def __init__(self, callbacks: Sequence[Callback], stop: StopSignal) -> None:
        if not isinstance(callbacks, (list, tuple)):
            raise UserError(f"callbacks cannot be {callbacks!r:.80}.", do="pass a list of callbacks")
        self.stop = stop
        self.error: BaseException | None = None
        """The first error of a callback."""
        self._members = [_functions(callback) for callback in callbacks]

    def on_step(self, metrics: StepMetrics) -> None:
        self._call("on_step", metrics.copy())  # a callback may change it

    def on_event(self, event: Event) -> None:
        self._call("on_event", event)

    def _call(self, name: str, argument: StepMetrics | Event) -> None:
        called = [member for member in self._members if name in member]
        if not called:
            return
        with keep_process_state():  # a callback that draws random numbers must not change the training
            for member in called:
                try:
                    if member[name](argument) is STOP:
                        self.stop.request("a callback")
                except StopTraining as request:
                    self.stop.request(str(request) or "a callback")
                except BaseException as error:
                    if isinstance(error, KeyboardInterrupt) and self.stop.requested:
                        raise  # a second Ctrl-C stops immediately
                    self._members.remove(member)
                    self.error = self.error or error
                    self.stop.request(f"{type(error).__name__} in a callback: {error}")


def _functions(callback: Any) -> Functions:
    """Return the functions of a callback by observer method."""
    if not isinstance(callback, type):
        methods = {name: getattr(callback, name, None) for name in _METHODS}
        if found := {name: method for name, method in methods.items() if callable(method)}:
            return found
        if callable(callback):
            return {"on_step": callback}
    kind = f"the class {callback.__qualname__}" if isinstance(callback, type) else f"{callback!r:.80}"
    raise UserError(
        f"{kind} is not a callback.",
        why="a callback is a function of the metrics, or an object with on_step(metrics) or on_event(event).",
        do="pass an instance of the class" if isinstance(callback, type) else "add one of these methods",
    )


@contextlib.contextmanager
def keep_process_state() -> Iterator[None]:
    """Restore the random state of the loaded frameworks afterwards."""
    with contextlib.ExitStack() as stack:
        for framework, engine in (("torch", "torch"), ("mlx.core", "mlx")):
            if framework in sys.modules:
                module = importlib.import_module(f"crosstune.{engine}_engine.device")
                stack.enter_context(module.keep_process_state())
        yield
