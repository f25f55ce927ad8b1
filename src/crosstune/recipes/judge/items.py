"""Define an item to judge: a task with one or two answers, and people's verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from crosstune.core.errors import UserError
from crosstune.recipes.judge.scale import Scale

WINNERS = ("A", "B", "tie")


@dataclass(frozen=True, kw_only=True)
class Item:
    id: str
    group: str
    """Items of one group, such as all translations of one sentence, stay in one split."""
    task: str
    answers: tuple[str, ...]
    """One answer to score, or two to compare."""
    reference: str = ""
    rubric: str = ""
    score: float | None = None
    scale: Scale | None = None
    """The scale of the score, if the row names it."""
    winner: str | None = None
    critique: str = ""
    issues: tuple[str, ...] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    """The prompt of the data; empty if the prompt is made from the fields above."""
    verdict: str = ""
    """The verdict text of the data."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the row, kept for predictions."""

    @property
    def is_pair(self) -> bool:
        return len(self.answers) == 2

    @property
    def is_labelled(self) -> bool:
        return self.score is not None or self.winner is not None

    @property
    def key(self) -> tuple[str, ...]:
        """The texts by which two items are the same."""
        return (self.task, *self.answers)


def common_scale(items: Sequence[Item], *, default: Scale) -> Scale:
    """Return the scale of all items; raise if there are several. An item without one is on the default scale."""
    found = {item.scale or default for item in items if not item.is_pair}
    if len(found) > 1:
        named = ", ".join(sorted(map(str, found)))
        raise UserError(
            f"The scores are on different scales: {named}.",
            why="a judge learns one scale.",
            do="bring them to one scale, or put them into two data sets",
        )
    return next(iter(found), default)


def swapped(item: Item) -> Item:
    """Return a pair with its answers in the other order."""
    winner = {"A": "B", "B": "A"}.get(item.winner or "", item.winner)
    return replace(item, answers=item.answers[::-1], winner=winner)
