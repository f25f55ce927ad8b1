"""Define what scores answers, and make the items that a judge reads from prompts and answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from crosstune.core.events import Observer
from crosstune.recipes.judge.items import Item

Score = Callable[[Sequence[Item]], list[float | None]]
"""Return the score of each item; None if it exceeds the judge's context."""


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """A judge, not loaded yet, or a function."""

    name: str
    open: Callable[[Observer], Score]
    identity: Any
    """The identity of the scores, for a journal."""
    compares: bool = False
    """True if an item has two answers: the score is then the probability that the first is better."""
    span: float = math.inf
    """The largest possible difference of two scores."""
    tie: float = 0.0
    """The largest difference of equal scores."""
    runs_code: bool = False
    low: float = 0.0
    """The lowest score, if the span is finite."""
    content: Callable[[], str] = str
    """Return a hash of everything that determines the scores, independent of its location."""


def answer_item(messages: Sequence[Any], answers: tuple[str, ...], number: int, reference: str = "") -> Item:
    last = next((turn["content"] for turn in reversed(messages) if turn["role"] == "user"), "")
    extra, name, task = {"prompt": last, "messages": list(messages)}, str(number), transcript(messages)
    replies = tuple([{"role": "assistant", "content": answer}] for answer in answers)
    turns: Any = {"prompt": list(messages), "replies": replies}
    return Item(id=name, group=name, task=task, answers=answers, reference=reference, extra=extra, **turns)


def transcript(messages: Sequence[Any]) -> str:
    """Return the text of a single message, or each turn after its role."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in messages)
