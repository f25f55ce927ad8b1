"""An item to judge (a task, one or two answers, the reference verdict), its score scale and labels; and scorers of answers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError, shown
from crosstune.core.events import Observer
from crosstune.data.read.formats import turns_text

WINNERS = ("A", "B", "tie")
MAX_POINTS = 11
"""Maximum number of score labels; on a longer scale they are evenly spaced."""
_RANGE = re.compile(r"(-?\d+(?:\.\d+)?)\s*(?:-|\.\.|to|,)\s*(-?\d+(?:\.\d+)?)")
_OTHER_SIDE = {"A": "B", "B": "A"}


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
    """The scale of the score, if the row specifies it."""
    winner: str | None = None
    critique: str = ""
    issues: tuple[str, ...] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    """The prompt in the data; empty if the prompt is made from the fields above."""
    verdict: str = ""
    """The verdict in the data, as written."""
    prompt: Sequence[dict[str, Any]] = ()
    """The turns before the answers, if the data has turns; `task` and `answers` are their text."""
    replies: tuple[Sequence[dict[str, Any]], ...] = ()
    """The turns of each answer; empty if the data has text."""
    tools: Sequence[Any] | None = None
    margin: float = 0.0
    """The target margin between the rewards of the better and the worse answer."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the row, kept for predictions."""

    @property
    def is_pair(self) -> bool:
        return len(self.answers) == 2

    @property
    def is_labeled(self) -> bool:
        return self.score is not None or self.winner is not None


def swapped(item: Item) -> Item:
    """Return a pair with its answers in the other order."""
    answers, replies = item.answers[::-1], item.replies[::-1]
    return replace(item, answers=answers, replies=replies, winner=other_winner(item.winner))


def other_winner(winner: str | None) -> str | None:
    """Return the winner after the answers are swapped."""
    return _OTHER_SIDE.get(winner or "", winner)


@dataclass(frozen=True, kw_only=True)
class Scale:
    low: float
    high: float

    @property
    def span(self) -> float:
        return self.high - self.low

    @property
    def point(self) -> float:
        """The size of one point: 1 on a scale of up to ten points, a tenth of a longer scale."""
        tenth = self.span / (MAX_POINTS - 1)
        return max(1.0, tenth) if self.span >= 1 else tenth

    def holds(self, score: float) -> bool:
        return math.isfinite(score) and self.low <= score <= self.high

    def normalized(self, score: float) -> float:
        """Return a score as a fraction of the scale."""
        return (score - self.low) / self.span

    def points(self) -> list[float]:
        """Return the scores that a model writes: whole numbers, or evenly spaced numbers on a longer scale."""
        whole = float(self.low).is_integer() and float(self.high).is_integer()
        if whole and self.span <= MAX_POINTS - 1:
            return [float(value) for value in range(int(self.low), int(self.high) + 1)]
        return [round(float(value), 6) for value in np.linspace(self.low, self.high, MAX_POINTS)]

    def __str__(self) -> str:
        return f"{write_number(self.low)}-{write_number(self.high)}"


def read_scale(text: str) -> Scale:
    """Read a scale such as 0-10 or 1-5."""
    match = _RANGE.fullmatch(text.strip())
    low, high = (float(match[1]), float(match[2])) if match else (0.0, 0.0)
    if not low < high or not math.isfinite(high - low):
        raise UserError(
            f"Invalid score_scale: {shown(text)}.",
            why="it needs the lowest and the highest score, in this order.",
            do="write it as 0-10 or 1-5",
        )
    return Scale(low=low, high=high)


def common_scale(items: Sequence[Item], *, default: Scale) -> Scale:
    """Return the scale of all scored items; raise if there are several. An item without a scale has the default."""
    found = {item.scale or default for item in items if not item.is_pair}
    if len(found) > 1:
        raise UserError(
            f"The scores are on different scales: {', '.join(sorted(map(str, found)))}.",
            why="a judge learns one scale.",
            do="convert them to one scale, or put them into two datasets",
        )
    return next(iter(found), default)


def write_number(value: float) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".") if not float(value).is_integer() else str(int(value))


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The labels that a model chooses from; for scores, with their values in ascending order."""

    texts: tuple[str, ...]
    values: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.texts)

    def neighbors(self, score: float) -> tuple[int, int, float]:
        """Return the nearest label, the label on the score's other side, and its probability.

        The expected value of the two labels is the score.
        """
        values = self.values
        upper = int(np.clip(np.searchsorted(values, score), 1, len(values) - 1))
        lower = upper - 1
        share = float(np.clip((score - values[lower]) / (values[upper] - values[lower]), 0.0, 1.0))
        return (lower, upper, share) if share <= 0.5 else (upper, lower, 1.0 - share)

    def distribution(self, score: float) -> NDArray[np.float64]:
        """Return the probability of each label for a score."""
        nearest, other, share = self.neighbors(score)
        found = np.zeros(len(self.values))
        found[nearest] += 1.0 - share
        found[other] += share
        return found


def number_labels(scale: Scale) -> Labels:
    points = scale.points()
    return Labels(texts=tuple(map(write_number, points)), values=tuple(points))


def digit_labels(scale: Scale) -> Labels:
    """Return the ten digits, spread evenly over the scale: one token each in almost every vocabulary."""
    return Labels(texts=tuple("0123456789"), values=tuple(np.linspace(scale.low, scale.high, 10).tolist()))


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
    return turns_text(messages, "\n\n")
