"""Score answers by comparing them with a column, their length, or their tags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from crosstune.config.options.rewards import RewardSpec
from crosstune.core.rewards import ScoredAnswer

Scores = list[float | str | None]
"""For each answer, its score, None if the reward does not apply, or the reason for a failure."""

_NUMBER = re.compile(
    r"(?<![\w.])[-+−]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:e[-+]?\d{1,3}(?!\w))?", re.I
)
_MARK = "####"
"""The line of GSM8K before the result."""
_CLOSE = Decimal("1e-6")
"""Relative difference of equal numbers, as of 0.333333 and 1/3 in decimals."""


class Reward:
    """A reward without its name and weight."""

    def score(self, answers: Sequence[ScoredAnswer]) -> Scores:
        """Return for each answer its score, None if the reward does not apply, or the reason for a failure."""
        raise NotImplementedError

    def identity(self) -> Any:
        """Return everything that determines the scores apart from the text of the request, as JSON."""

    def close(self) -> None:
        """End child processes and free models, if there are any."""


class CheckReward(Reward):
    """An `exact`, `number`, `contains`, `length` or `tags` reward: check each answer separately, in this process."""

    def __init__(self, spec: RewardSpec) -> None:
        self._kind, self._argument = spec.kind, spec.argument

    def score(self, answers: Sequence[ScoredAnswer]) -> Scores:
        return [self._check(one) for one in answers]

    def _check(self, one: ScoredAnswer) -> float | None:
        if self._kind == "length":
            return _length(one.answer, self._argument)
        if self._kind == "tags":
            return _tags(one.answer, [name.strip() for name in self._argument.split(",")])
        expected = one.columns.get(self._argument)
        compare = {"exact": _exact, "number": _number, "contains": _contains}[self._kind]
        return None if expected is None else compare(final_text(one.answer), expected)


def final_text(answer: str) -> str:
    """Return the text after the last `</think>`; if it has an `<answer>` element, only the content of the last one."""
    text = answer.rpartition("</think>")[2]
    inside, closed, _ = text.rpartition("</answer>")
    _, opened, found = inside.rpartition("<answer>")
    return (found if closed and opened else text).strip()


def last_number(text: str) -> Decimal | None:
    """Return the first number after the last `####`, or the last number of the text."""
    _, mark, result = text.rpartition(_MARK)
    found = _NUMBER.findall(result)
    return Decimal((found[0] if mark else found[-1]).replace(",", "").replace("−", "-")) if found else None


def _exact(text: str, expected: Any) -> float:
    return float(text in [str(each).strip() for each in _each(expected)])


def _contains(text: str, expected: Any) -> float:
    """Return the fraction of the expected texts that occur."""
    texts = [str(each) for each in _each(expected)]
    return sum(each in text for each in texts) / max(len(texts), 1)


def _number(text: str, expected: Any) -> float | None:
    right, found = last_number(str(expected)), last_number(text)
    if right is None:
        return None
    return float(found is not None and abs(found - right) <= _CLOSE * max(abs(right), abs(found)))


def _each(expected: Any) -> Sequence[Any]:
    return expected if isinstance(expected, (list, tuple)) else [expected]


def _length(text: str, argument: str) -> float:
    """Return 1 within MIN-MAX; outside, the score falls linearly to 0 at an empty answer and at twice MAX."""
    low, high = map(int, argument.removesuffix("chars").split("-"))
    length = len(text) if argument.endswith("chars") else len(text.split())
    if length < low:
        return length / low
    return max(0.0, 1.0 - (length - high) / max(high, 1)) if length > high else 1.0


def _tags(text: str, names: Sequence[str]) -> float:
    """Return 1 if the text consists of the elements in this order, each once, with only whitespace around them."""
    rest = text
    for name in names:
        before, opened, rest = rest.partition(f"<{name}>")
        _, closed, rest = rest.partition(f"</{name}>")
        if before.strip() or not (opened and closed) or text.count(opened) + text.count(closed) > 2:
            return 0.0
    return float(not rest.strip())
