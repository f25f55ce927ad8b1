"""How one option is declared: its default and words, when it has an effect, and what it means for a run that continues."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field
from enum import Flag, auto
from typing import Any, Union

from crosstune.config.conditions import Condition
from crosstune.config.unbuilt import Unbuilt

Choices = Sequence[str] | Callable[[], Sequence[str]]


class OnResume(Flag):
    """What a change of an option means when a run continues."""

    REPORTED = 0
    """It shapes what is learned or how fast: the change is allowed and reported."""
    FREE = auto()
    """It leaves the training as it is: where it runs, what it prints, what it keeps."""
    ONE_START = auto()
    """It concerns one start of the run: the run does not keep it, and a change is not reported."""
    OWN_MACHINE = auto()
    """It is chosen for one machine: a checkpoint that is opened elsewhere does not bring it along."""
    DIVIDES_DATA = auto()
    """It decides which rows of a data set are trained on."""
    ADAPTER = auto()
    """It decides what the weights of a trained adapter mean."""
    NEW_BLOCKS = auto()
    """It decides which blocks are trained."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One declaration, ready for a parser."""

    name: str
    type: type
    optional: bool
    default: Any
    text: str
    group: str
    aliases: tuple[str, ...]
    low: float | None
    high: float | None
    env: str | None
    needs: tuple[Condition, ...]
    on_resume: OnResume
    unbuilt: Unbuilt | None
    fixed_choices: Choices | None

    @property
    def choices(self) -> tuple[str, ...] | None:
        if self.fixed_choices is None:
            return None
        return tuple(self.fixed_choices() if callable(self.fixed_choices) else self.fixed_choices)


def option(
    default: Any,
    text: str,
    *,
    choices: Choices | None = None,
    aliases: Sequence[str] = (),
    low: float | None = None,
    high: float | None = None,
    env: str | None = None,
    needs: Sequence[Condition] = (),
    on_resume: OnResume = OnResume.REPORTED,
    unbuilt: Unbuilt | None = None,
) -> Any:
    """Declare an option as a field of a dataclass.

    `needs` are the conditions under which it has an effect, `on_resume` says what a change of it means when a run
    continues, `unbuilt` names what `plan` resolves but `train` cannot do yet.
    """
    words = {
        "text": text,
        "choices": choices,
        "aliases": tuple(aliases),
        "low": low,
        "high": high,
        "env": env,
    }
    facts = {"needs": tuple(needs), "on_resume": on_resume, "unbuilt": unbuilt}
    return field(default=default, metadata=words | facts)


def read_option(item: Field[Any], *, hint: Any, group: str) -> Option:
    """Return the declaration behind a field."""
    optional = typing.get_origin(hint) in (types.UnionType, Union)
    kind = next(arg for arg in typing.get_args(hint) if arg is not type(None)) if optional else hint
    assert item.default is not MISSING, item.name
    facts = dict(item.metadata)
    choices = facts.pop("choices")
    return Option(
        name=item.name,
        type=kind,
        optional=optional,
        default=item.default,
        group=group,
        fixed_choices=choices,
        **facts,
    )
