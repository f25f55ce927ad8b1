"""Score answers by comparing them with a column, their length, or their tags."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from crosstune.config.options.rewards import RewardSpec, length_range, tag_names
from crosstune.core.rewards import ScoredAnswer

Check = Callable[[ScoredAnswer], float | None]
"""Return the score of an answer; None if its row has no value to compare with."""

_NUMBER = re.compile(
    r"(?<![\w.])[-+−]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:e[-+]?\d{1,3}(?!\w))?", re.I
)
_MARK = "####"
"""The line of GSM8K before the result."""
_CLOSE = Decimal("1e-6")
"""Relative difference of equal numbers, as of 0.333333 and 1/3 in decimals."""


def make_check(spec: RewardSpec) -> Check:
    """Return the check of an `exact`, `number`, `contains`, `length` or `tags` reward."""
    if spec.kind == "length":
        low, high, counts_characters = length_range(spec.argument)
        return lambda one: _length(one.answer, low, high, counts_characters=counts_characters)
    if spec.kind == "tags":
        return lambda one: _tags(one.answer, tag_names(spec.argument))
    compare = {"exact": _exact, "number": _number, "contains": _contains}[spec.kind]

    def check(one: ScoredAnswer) -> float | None:
        expected = one.columns.get(spec.argument)
        return None if expected is None else compare(final_text(one.answer), expected)

    return check


def final_text(answer: str) -> str:
    """Return the text after the reasoning: after the last `</think>`, and inside the last `<answer>` if there is one."""
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


def _length(text: str, low: int, high: int, *, counts_characters: bool) -> float:
    """Return 1 within the range; the score falls to 0 towards an empty answer, and towards twice the longest length."""
    length = len(text) if counts_characters else len(text.split())
    if length < low:
        return length / low
    return max(0.0, 1.0 - (length - high) / high) if length > high else 1.0


def _tags(text: str, names: Sequence[str]) -> float:
    """Return 1 if the text is the elements in their order, each once, with only white space around them."""
    rest = text
    for name in names:
        before, opened, rest = rest.partition(f"<{name}>")
        _, closed, rest = rest.partition(f"</{name}>")
        if before.strip() or not (opened and closed) or text.count(opened) + text.count(closed) > 2:
            return 0.0
    return float(not rest.strip())
