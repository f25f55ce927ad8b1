"""Define the errors that users read, and the exit codes."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

EXIT_DONE = 0
EXIT_OUR_FAULT = 1
EXIT_USER_MUST_ACT = 2
EXIT_STOPPED = 3
EXIT_PEER_LOST = 4
EXIT_PORT_TAKEN = 5
EXIT_AT_ONCE = 130

LIBRARY_FAULTS = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    OSError,
    ImportError,
    RuntimeError,
)
"""What a library may raise that builds a model from files with settings it does not expect."""


class UserError(Exception):
    """An error that the user can mend: what was asked, why it does not work here, and what to do instead."""

    exit_code = EXIT_USER_MUST_ACT

    def __init__(self, asked: str, *, why: str = "", do: str = "") -> None:
        self.asked, self.why, self.do = asked, why, do
        super().__init__("\n".join(self.lines()))

    def lines(self) -> list[str]:
        return [
            self.asked,
            *(f"  why: {self.why}",) * bool(self.why),
            *(f"  do:  {self.do}",) * bool(self.do),
        ]


class ConfigError(UserError):
    """All problems of a configuration."""

    def __init__(self, problems: Sequence[UserError]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        super().__init__(f"{count} problem{'s' * (count != 1)} in the configuration")

    def lines(self) -> list[str]:
        return [line for problem in self.problems for line in problem.lines()]


class NonFiniteError(UserError):
    """The loss or a gradient is not finite; raised before the optimizer step."""

    def with_blame(self, blame: str, *, num_skipped: int) -> NonFiniteError:
        """Return the error with the layer or weight where it began."""
        left_out = f" {num_skipped} such steps were skipped before." if num_skipped else ""
        return NonFiniteError(self.asked, why=f"{blame}; {self.why}{left_out}", do=self.do)


class PeerLost(UserError):
    """Another process of the run is gone; the state is that of the last complete step."""

    exit_code = EXIT_PEER_LOST


class PortTaken(UserError):
    """The port of a process is in use; raised before anything is written."""

    exit_code = EXIT_PORT_TAKEN


class OutOfMemory(UserError):
    """A step does not fit into memory; raised before the optimizer step."""

    def __init__(self, why: str) -> None:
        super().__init__(
            "There is not enough memory on the device for a step.",
            why=f"{why}; the weights are those of the previous step.",
            do="continue with a smaller --batch_size and more --gradient_accumulation_steps, --use_gradient_checkpointing, "
            "a shorter --context_length, or --train_type qlora",
        )


def shown(value: Any) -> str:
    """Return a value for an error text: its repr, shortened."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    text = short.repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def nothing_to_train(model: str) -> UserError:
    return UserError(
        f"{model} has no weight to train.",
        why="every parameter of the model that the recipe built is frozen.",
        do="leave some of them trainable in the task's `build`",
    )


def raise_all(problems: Sequence[UserError]) -> None:
    """Raise one ConfigError with all problems; do nothing when there are none."""
    if problems:
        raise ConfigError(problems)
