"""Check the types and ranges of fields in untrusted JSON objects, with errors that name the field."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.core.errors import shown
from crosstune.files.plain_files import UnreadableFile


@dataclass(frozen=True)
class Rule:
    """The requirement of a field, as text and as a test."""

    needs: str
    fits: Callable[[Any], bool]

    def __or__(self, other: Rule) -> Rule:
        return Rule(f"{self.needs} or {other.needs}", lambda value: self.fits(value) or other.fits(value))


def whole(low: int, high: int = 2**62) -> Rule:
    """An integer from `low` to `high`."""
    upper = f" and at most {high:,}" if high < 2**62 else ""
    return Rule(
        f"an integer of {low:,} or more{upper}", lambda value: type(value) is int and low <= value <= high
    )


def real(low: float = -math.inf, high: float = math.inf) -> Rule:
    """A finite number from `low` to `high`."""
    bounds = f" of {low:g} or more" if low > -math.inf else ""
    bounds = f" from {low:g} to {high:g}" if high < math.inf else bounds
    return Rule(
        f"a finite number{bounds}",
        lambda value: type(value) in (int, float) and low <= value <= high and abs(value) < math.inf,
    )


def list_of(rule: Rule) -> Rule:
    return Rule(
        f"a list in which every item is {rule.needs}",
        lambda value: isinstance(value, list) and all(map(rule.fits, value)),
    )


def map_of(rule: Rule) -> Rule:
    return Rule(
        f"an object in which every value is {rule.needs}",
        lambda value: isinstance(value, dict) and all(map(rule.fits, value.values())),
    )


def object_with(rules: Mapping[str, Rule]) -> Rule:
    """An object that has all of these fields; others are not checked."""
    needs = ", ".join(f"{rule.needs} at {name}" for name, rule in rules.items())
    return Rule(
        f"an object with {needs}",
        lambda value: isinstance(value, dict) and wrong_field(value, rules, required=tuple(rules)) is None,
    )


TEXT = Rule("a string", lambda value: isinstance(value, str))
FLAG = Rule("true or false", lambda value: isinstance(value, bool))
OBJECT = Rule("an object", lambda value: isinstance(value, dict))
NOTHING = Rule("null", lambda value: value is None)
ANYTHING = Rule("any value", lambda value: True)


def wrong_field(
    data: Mapping[str, Any], rules: Mapping[str, Rule], *, required: tuple[str, ...] = (), place: str = ""
) -> str | None:
    """Describe the first field that breaks its rule; None when all are right. Fields without a rule are not checked."""
    for name in required:
        if name not in data:
            return f"it lacks {place}{name}, which needs {rules.get(name, ANYTHING).needs}"
    for name, rule in rules.items():
        if name in data and not rule.fits(data[name]):
            return f"it needs {rule.needs} at {place}{name}, got {shown(data[name])}"
    return None


def check_fields(
    data: Mapping[str, Any],
    rules: Mapping[str, Rule],
    *,
    source: Path | str,
    required: tuple[str, ...] = (),
    place: str = "",
    do: str = "download or copy the file again",
) -> None:
    """Raise UnreadableFile for the first field that breaks its rule."""
    wrong = wrong_field(data, rules, required=required, place=place)
    if wrong is not None:
        raise UnreadableFile(source, wrong, do=do)
