"""Define a rung of the ladder: a change of the options, and its promise about the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from crosstune.config.resolve.plan import Plan
from crosstune.config.schema import Config

Change = Mapping[str, Any]
"""Option -> its new value."""
Gain = Literal["speed", "memory", "safety"]


class NotApplicable(Exception):
    """Raised by a rung that does not apply to a training; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The options kept so far, and their plan on this machine."""

    config: Config
    plan: Plan
    mean_tokens: float
    """Mean number of tokens of an example in the measured steps; 0 if the recipe does not say."""
    longest_tokens: int
    """Tokens of the longest example; 0 if the recipe does not say."""


@dataclass(frozen=True, kw_only=True)
class SameBits:
    """Every loss is the same, bit for bit."""

    text = "same loss bits"


@dataclass(frozen=True, kw_only=True)
class Within:
    """Every loss differs by at most `bound`, relative to the baseline's."""

    bound: float

    @property
    def text(self) -> str:
        return f"same loss within {self.bound:g}"


@dataclass(frozen=True, kw_only=True)
class AsGood:
    """At equal supervised tokens, the metric is at most `bound` worse, relative to the baseline's. For changes that put
    other rows into a step or change the loss itself."""

    bound: float
    metric: str = "loss"
    higher_is_better: bool = False

    @property
    def text(self) -> str:
        return f"{self.metric} no worse than {self.bound:g} at equal tokens"


LossPromise = SameBits | Within | AsGood


@dataclass(frozen=True, kw_only=True)
class Rung:
    """An optimisation: a row of the table in `rungs`, or `RUNG` in a file there, named after it."""

    title: str
    order: int
    """Rungs are tried from the lowest number on."""
    gain: Gain
    """What it is for. A rung for safety is kept unless it breaks its promise or costs speed or memory."""
    promise: LossPromise
    propose: Callable[[Situation], Sequence[Change]]
    """Return changes to try one on top of the other, until one does not help; raise NotApplicable if there is none."""
