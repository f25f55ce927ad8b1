"""Read what a sweep varies: ranges and lists of values of options."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crosstune.config.option_names import find_option
from crosstune.config.values import convert_value
from crosstune.core.errors import UserError, raise_all, shown

SAME_IN_ALL = frozenset(
    {
        "name",
        "output_dir",
        "overwrite",
        "resume",
        "emulate",
        "skip_eval",
        "eval_steps",
        "time_limit",
        "world_size",
    }
)
DIGITS = 4
"""Significant digits of a number drawn from a range."""
_MOST_LISTED = 100_000
"""Combinations. With more, random draws find one that was not tried."""
_FORMS = "write a range as NAME=LOW..HIGH or NAME=LOW..HIGH:log, and a list as NAME=A,B,C"


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """A varied option: its choices, or a range of numbers."""

    name: str
    choices: tuple[Any, ...] = ()
    low: float = 0
    high: float = 0
    is_log: bool = False
    is_integer: bool = False

    @property
    def values(self) -> Sequence[Any] | None:
        """All values; None for a range of real numbers."""
        return self.choices or (range(int(self.low), int(self.high) + 1) if self.is_integer else None)

    @property
    def num_values(self) -> float:
        return len(self.choices) or (self.high - self.low + 1 if self.is_integer else math.inf)

    @property
    def first(self) -> Any:
        return self.choices[0] if self.choices else self.low

    def rounded(self, value: Any) -> Any:
        """Round a drawn number, so that people can read it."""
        if self.values is not None:
            return value
        return min(self.high, max(self.low, float(f"{value:.{DIGITS}g}")))


Space = Mapping[str, Dimension]
"""Option name -> dimension, in the order of the request."""


def read_space(texts: Sequence[str]) -> Space:
    """Read the values of --over; raise all problems at once."""
    space, problems = dict[str, Dimension](), list[UserError]()
    for text in texts:
        try:
            found = _read(text, f"--over {shown(text)[1:-1]}")
            if found.name in space:
                raise UserError(f"--over has {found.name} twice.", do="keep one of them")
            space[found.name] = found
        except UserError as error:
            problems.append(error)
    raise_all(problems)
    return space


def num_combinations(space: Space) -> float:
    """Return the number of combinations of values; infinite if a range of real numbers is among them."""
    return math.prod(dimension.num_values for dimension in space.values())


def combinations(space: Space) -> list[dict[str, Any]]:
    """Return all combinations of values; none if they are more than a list should have."""
    if num_combinations(space) > _MOST_LISTED:
        return []
    values = [dimension.values or () for dimension in space.values()]
    return [dict(zip(space, each, strict=True)) for each in itertools.product(*values)]


def _read(text: str, where: str) -> Dimension:
    key, _, values = text.partition("=")
    named = find_option(key.strip(), where) if values.strip() else None
    if named is None:
        raise UserError(f"{where} has no values.", do=_FORMS)
    option = named.option
    if option.name in SAME_IN_ALL:
        raise UserError(
            f"A sweep cannot vary {option.name}: it is the same in all trials.", do="vary another option"
        )
    if option.type not in (int, float) or ".." not in values:
        parts = values.split(";" if ";" in values else ",")  # a value may contain commas
        choices = [option.written(convert_value(option, part.strip(), where)) for part in parts]
        if len(set(choices)) == 1:
            raise UserError(f"{where} has a single value.", do=f"pass it as --{option.name}, or add values")
        return Dimension(name=option.name, choices=tuple(dict.fromkeys(choices)))
    is_log = values.strip().endswith(":log")
    ends = values.strip().removesuffix(":log").split("..")
    if len(ends) != 2 or not all(ends):
        raise UserError(f"{where} is not a range with two bounds.", do=_FORMS)
    low, high = (convert_value(option, end, where) for end in ends)
    if low >= high:
        raise UserError(f"{where} is an empty range: {low:g} is not below {high:g}.", do="swap the bounds")
    if is_log and low <= 0:
        raise UserError(f"{where} cannot be logarithmic.", do="use a lower bound above 0, or remove :log")
    return Dimension(name=option.name, low=low, high=high, is_log=is_log, is_integer=option.type is int)
