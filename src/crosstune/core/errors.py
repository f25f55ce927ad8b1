"""Define the errors that users read, how they show values, and the exit codes."""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from crosstune.core.safe_text import redact

EXIT_DONE = 0
EXIT_OUR_FAULT = 1
EXIT_USER_MUST_ACT = 2
EXIT_STOPPED = 3
EXIT_PEER_LOST = 4
EXIT_PORT_TAKEN = 5
EXIT_HUNG = 6
"""The exit code of a rank that its watchdog aborted; the launcher exits with 1."""
EXIT_AT_ONCE = 130

LIBRARY_FAULTS = (
    ValueError,
    TypeError,
    AttributeError,
    NameError,
    LookupError,
    ArithmeticError,
    AssertionError,
    OSError,
    ImportError,
    RuntimeError,
)
"""Errors that a library raises when it builds a model from unexpected settings."""
LONGEST_TEXT = 2000
"""Maximum number of characters in each part of an error; longer parts lose their middle."""
LONGEST_VALUE = 80
MAX_PROBLEMS = 40
"""Maximum number of configuration problems to print."""


class UserError(Exception):
    """An error that the user can fix: what was requested, why it does not work, and what to do instead."""

    exit_code = EXIT_USER_MUST_ACT

    def __init__(self, message: str, *, why: str = "", do: str = "") -> None:
        self.message, self.why, self.do = readable(message), readable(why), readable(do)
        super().__init__(self.message)

    def __str__(self) -> str:
        return "\n".join(self.lines())  # `naming` may have changed the message

    def lines(self) -> list[str]:
        return [
            self.message,
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
        lines = [line for problem in self.problems[:MAX_PROBLEMS] for line in problem.lines()]
        more = len(self.problems) - MAX_PROBLEMS
        return [*lines, f"... and {more:,} more problems."] if more > 0 else lines


class NonFiniteError(UserError):
    """The loss or a gradient is not finite; raised before the optimizer step."""

    def with_blame(self, blame: str, *, num_skipped: int) -> NonFiniteError:
        """Return the error with the layer or weight where it began."""
        left_out = f" {num_skipped} such steps were skipped before." if num_skipped else ""
        return NonFiniteError(self.message, why=f"{blame}; {self.why}{left_out}", do=self.do)


class PeerLost(UserError):
    """Another process of the run was lost; this process still has the state of the last complete step."""

    exit_code = EXIT_PEER_LOST


class PortTaken(UserError):
    """The port of a process is in use; raised before anything is written."""

    exit_code = EXIT_PORT_TAKEN


def readable(text: str) -> str:
    """Return text for display: at most LONGEST_TEXT characters, without secrets, control characters escaped."""
    if len(text) > LONGEST_TEXT:
        half = LONGEST_TEXT // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return redact("".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text))


def shown(value: Any) -> str:
    """Return a value of any type for an error: its repr, shortened to about LONGEST_VALUE characters."""
    if isinstance(value, str) and len(value) <= LONGEST_TEXT:
        value = redact(value)
    return _SHORT.repr(value)


END_WITH_BACKSLASH = "end the line with its backslash: remove the spaces or the comment after it"


def follows_backslash(word: str) -> bool:
    """Return True for the argument that a shell makes of a space, or a space and a comment, after a backslash."""
    return word[:1].isspace() and word.strip()[:1] in ("", "#")


class _Short(reprlib.Repr):
    """Shorten a repr without computing all of it first: nested YAML aliases can expand without limit."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = LONGEST_VALUE
        self.maxlevel, self.maxlist, self.maxtuple, self.maxdict = 2, 3, 3, 3

    def repr(self, x: Any) -> str:
        text = super().repr(x)
        return text if len(text) <= LONGEST_VALUE else f"{text[:60]}...{text[-15:]}"

    def repr_int(self, x: int, level: int) -> str:
        digits = int(x.bit_length() * 0.30103) + 1
        return repr(x) if digits <= LONGEST_VALUE else f"an integer of {digits:,} digits"


_SHORT = _Short()


def keeps_statistics(layer: str) -> UserError:
    return UserError(
        f"The layer {layer} cannot be trained.",
        why="it keeps running statistics, which checkpoints do not contain: a resumed run would differ.",
        do="use track_running_stats=False, or a layer norm",
    )


def nothing_to_train(model: str) -> UserError:
    return UserError(
        f"{model} has no trainable weights.",
        why="every parameter of the model that the recipe built is frozen.",
        do="keep some of them trainable in the task's `build`",
    )


def raise_all(problems: Iterable[UserError]) -> None:
    """Raise one ConfigError with all problems; do nothing when there are none."""
    if found := list(problems):
        raise ConfigError(found)


@contextlib.contextmanager
def naming(option: str) -> Iterator[None]:
    """Add the name of the option to a UserError that does not mention it."""
    try:
        yield
    except UserError as error:
        if option not in error.message:
            error.message = f"{error.message.rstrip('.')} (--{option})."
        raise
