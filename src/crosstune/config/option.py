"""Declare an option: default, help text, conditions, and the effect of a change on resume."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field
from enum import Enum, Flag, auto
from typing import Any, Union

from crosstune.config.conditions import Condition
from crosstune.core.backend import BACKENDS_PACKAGE
from crosstune.core.names import plugin_names

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_PART = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)([dhms])")
_LONGEST_S = 10 * 366 * 86400


def parse_duration(text: str) -> float:
    """Return the seconds; a number without a unit is seconds. Raise a ValueError that shows valid durations."""
    compact = text.strip().lower()
    if not any(unit in compact for unit in _SECONDS):
        compact += "s"
    parts = _PART.findall(compact)
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    is_whole = "".join(number + unit for number, unit in parts) == compact
    if not is_whole or not 0 < seconds <= _LONGEST_S:
        raise ValueError("a duration such as 90s, 30m, 3h30m or 1d, of at most ten years")
    return seconds


Choices = Sequence[str] | Callable[[], Sequence[str]]
"""A callable is evaluated on use, since it lists plug-ins."""
Check = Callable[[Any], str | None]
"""Return the accepted values if a value of the right type is invalid, otherwise None."""


class StringKind(Enum):
    """The kind of string that an option accepts."""

    WORDS = auto()
    PATH = auto()
    """A file or folder; some options also accept names."""
    FOLDER_NAME = auto()
    """A folder name, without its parents."""


class OnResume(Flag):
    """The effect of a changed option on a resumed run."""

    REPORTED = 0
    """The option affects the training: a change is allowed and reported."""
    FREE = auto()
    """The option does not affect the training: its location, output, or files to keep."""
    ONE_START = auto()
    """The option applies to one start only and is not recorded."""
    OWN_MACHINE = auto()
    """The option is chosen per machine: a checkpoint from a different machine does not set it."""
    MAY_CHANGE_DATA = auto()
    """The option may change the training examples. A resume compares their hash, and reports this option as the cause of a
    difference."""
    ADAPTER = auto()
    """The option determines the shape or scale of adapters."""
    NEW_BLOCKS = auto()
    """The option determines the trained blocks."""
    MODEL = auto()
    """The option chooses the model, whose hash a resume compares."""
    ORDER = auto()
    """The option determines the rows of a step, or the answers to its prompts."""
    QUANTIZATION = auto()
    """The option determines the quantized base."""
    TRAINABLE = auto()
    """The option determines what is trained: the method, or the number of layers with adapters."""
    OPTIMIZER = auto()
    """The option determines which moments are stored."""
    OBJECTIVE = auto()
    """The option determines the loss of preferences or distillation."""


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
    low: float = 0
    high: float | None = None
    """Bounds of a number; None for other types."""
    holds: StringKind = StringKind.WORDS
    check: Check | None = None
    """Validates a value of the right type."""
    env: str | None = None
    """Environment variable that sets the option."""
    needs: Sequence[Condition] = ()
    """Conditions for the option to have an effect."""
    on_resume: OnResume = OnResume.REPORTED
    longest: int = 4096
    """Characters of a string; the default is also the longest path on Linux."""
    reads_lines: bool = False
    """True if a text file with one item per line may replace a list."""
    joins_items: str | None = None
    """Separator of key and value if files and Python may pass a mapping, "" if only a list; None if neither. Items are
    joined with commas."""
    all_choices: Choices | None = None
    instead: Mapping[str, str] = field(default_factory=dict)
    """Advice for values that are no choice, such as --recipe dpo."""
    auto: int | None = None
    """Value that represents the word `auto`, outside the bounds; None if the word is not accepted."""

    def written(self, value: Any) -> Any:
        """Return the value as the user writes it."""
        return "auto" if self.auto is not None and value == self.auto else value

    def applies_to(self, recipe: str) -> bool:
        """Return False if the option has no effect in any run of the recipe."""
        return all(not condition.recipes or recipe in condition.recipes for condition in self.needs)

    @property
    def choices(self) -> tuple[str, ...] | None:
        if self.all_choices is None:
            return None
        return tuple(self.all_choices() if callable(self.all_choices) else self.all_choices)


def option(default: Any, text: str, *, choices: Choices | None = None, **facts: Any) -> Any:
    """Declare an option as a dataclass field; `facts` are fields of `Option`."""
    return field(default=default, metadata={"text": text, "all_choices": choices, **facts})


def backend_choices() -> Sequence[str]:
    return ("auto", *plugin_names(BACKENDS_PACKAGE))


def not_zero(value: int) -> str | None:
    """Reject 0 for an option where -1 means all."""
    return "-1 for all, or an integer of 1 or more" if value == 0 else None


def below_one(value: float) -> str | None:
    """Reject a decay of 1: the moment would never change."""
    return "a number of 0 or more and below 1" if value == 1 else None


def check_duration(value: str) -> str | None:
    """Reject a string that is not a duration."""
    try:
        parse_duration(value)
    except ValueError as error:
        return str(error)
    return None


def read_option(item: Field[Any], *, hint: Any, group: str) -> Option:
    """Return the option that a dataclass field declares."""
    optional = typing.get_origin(hint) in (types.UnionType, Union)
    kind = next(arg for arg in typing.get_args(hint) if arg is not type(None)) if optional else hint
    assert item.default is not MISSING, item.name
    return Option(
        name=item.name, type=kind, optional=optional, default=item.default, group=group, **item.metadata
    )
