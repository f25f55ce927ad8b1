"""Declare an option: its default and help text, when it has an effect, and what a change means on resume."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field
from enum import Enum, Flag, auto
from typing import Any, Union

from crosstune.config.conditions import Condition
from crosstune.core.durations import parse_duration

Choices = Sequence[str] | Callable[[], Sequence[str]]
Check = Callable[[Any], str | None]
"""Returns what the option takes if a value of its type is wrong, otherwise None."""


class Holds(Enum):
    """The content of an option's string."""

    WORDS = auto()
    PATH = auto()
    """A file or folder; some options also take names."""
    FOLDER_NAME = auto()
    """The name of one folder, without its parents."""


class OnResume(Flag):
    """The effect of a changed option on a resumed run."""

    REPORTED = 0
    """The option affects what is learned: a change is allowed and reported."""
    FREE = auto()
    """The option does not affect the training: where it runs, what it prints, which files it keeps."""
    ONE_START = auto()
    """The option applies to one start: the run does not keep it, and a change is not reported."""
    OWN_MACHINE = auto()
    """The option is chosen per machine: it is not taken over from a checkpoint of another machine."""
    DIVIDES_DATA = auto()
    """The option decides which rows of a dataset are trained on."""
    ADAPTER = auto()
    """The option decides the shape or the scale of an adapter."""
    NEW_BLOCKS = auto()
    """The option decides which blocks are trained."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """The declaration of one option."""

    name: str
    type: type
    optional: bool
    default: Any
    text: str
    group: str
    aliases: Sequence[str] = ()
    low: float | None = None
    high: float | None = None
    """The limits of a number."""
    holds: Holds = Holds.WORDS
    check: Check | None = None
    """Refuses values of the right type."""
    env: str | None = None
    """The environment variable that sets it."""
    needs: Sequence[Condition] = ()
    """The conditions under which it has an effect."""
    on_resume: OnResume = OnResume.REPORTED
    joins_items: str | None = None
    """Set if a file or Python may give a list, which is joined by commas: the text between key and value of a mapping's
    items, or an empty string if it takes no mapping."""
    all_choices: Choices | None = None
    auto: int | None = None
    """The value that stands for the word `auto`, outside of its limits; None if it does not take the word."""

    def written(self, value: Any) -> Any:
        """Return a value as people write it."""
        return "auto" if self.auto is not None and value == self.auto else value

    @property
    def choices(self) -> tuple[str, ...] | None:
        if self.all_choices is None:
            return None
        return tuple(self.all_choices() if callable(self.all_choices) else self.all_choices)


def option(default: Any, text: str, *, choices: Choices | None = None, **facts: Any) -> Any:
    """Declare an option as a field of a dataclass; `facts` are fields of `Option`."""
    return field(default=default, metadata={"text": text, "all_choices": choices, **facts})


def not_zero(value: int) -> str | None:
    """Refuse 0, for an option where -1 is for all."""
    return "-1 for all, or an integer from 1 up" if value == 0 else None


def check_duration(value: str) -> str | None:
    """Refuse a text that is no duration."""
    try:
        parse_duration(value)
    except ValueError as error:
        return str(error)
    return None


def read_option(item: Field[Any], *, hint: Any, group: str) -> Option:
    """Return the declaration behind a field."""
    optional = typing.get_origin(hint) in (types.UnionType, Union)
    kind = next(arg for arg in typing.get_args(hint) if arg is not type(None)) if optional else hint
    assert item.default is not MISSING, item.name
    return Option(
        name=item.name, type=kind, optional=optional, default=item.default, group=group, **item.metadata
    )
