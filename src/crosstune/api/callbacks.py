"""Pass the steps and events of a run to a program's callbacks, which can stop it."""

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
"""An object with `on_step(metrics)`, `on_event(event)` or both, or a function that is called with the metrics of each
step. Metrics are a `StepMetrics`, an event is one of the classes in `crosstune.core.events`."""

_METHODS = ("on_step", "on_event")

Functions = dict[str, Callable[[Any], object]]
"""Name of an observer's method -> what it calls."""


class Callbacks:
    """An observer that calls the callbacks of a program.

    An error in one of them must not cost steps: the run stops after the current step and saves a checkpoint, and the
    error is raised when it has ended.
    """

    def __init__(self, callbacks: Sequence[Callback], stop: StopSignal) -> None:
        if not isinstance(callbacks, (list, tuple)):
            raise UserError(f"callbacks cannot be {callbacks!r:.80}.", do="pass a list of callbacks")
        self.stop = stop
        self.error: BaseException | None = None
        """The first error of a callback."""
        self._members = [_functions(callback) for callback in callbacks]

    def on_step(self, metrics: StepMetrics) -> None:
        self._call("on_step", dict(metrics))

    def on_event(self, event: Event) -> None:
        self._call("on_event", event)

    def raise_error(self) -> None:
        """Raise the error of a callback, if there was one."""
        if self.error is not None:
            raise self.error

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
                except (Exception, SystemExit) as error:  # noqa: BLE001 (raised by `raise_error`)
                    self._members.remove(member)
                    self.error = self.error or error
                    self.stop.request(f"{type(error).__name__} in a callback: {error}")


def _functions(callback: Any) -> Functions:
    """Return the functions of a callback by the name of the observer's method that calls them."""
    if not isinstance(callback, type):
        methods = {name: getattr(callback, name, None) for name in _METHODS}
        if found := {name: method for name, method in methods.items() if callable(method)}:
            return found
        if callable(callback):
            return {"on_step": callback}
    kind = f"the class {callback.__qualname__}" if isinstance(callback, type) else f"{callback!r:.80}"
    raise UserError(
        f"{kind} is not a callback.",
        why="a callback is an object with a method on_step(metrics) or on_event(event), or a function of the metrics.",
        do="pass an instance of the class" if isinstance(callback, type) else "give it one of these methods",
    )


@contextlib.contextmanager
def keep_process_state() -> Iterator[None]:
    """Put the random state of the loaded frameworks back afterwards."""
    with contextlib.ExitStack() as stack:
        for framework, engine in (("torch", "torch"), ("mlx.core", "mlx")):
            if framework in sys.modules:
                module = importlib.import_module(f"crosstune.{engine}_engine.process_state")
                stack.enter_context(module.keep_process_state())
        yield
