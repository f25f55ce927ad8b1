"""Define a rung: option changes to try, their expected gain, and their promise about the loss."""

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
    """Raised by a rung that does not apply to a run; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The options kept so far, and their plan on this machine."""

    config: Config
    plan: Plan
    mean_tokens: float
    """Mean number of tokens of an example; 0 if the recipe does not record it."""
    longest_tokens: int
    """Tokens of the longest example; 0 if the recipe does not record it."""


@dataclass(frozen=True, kw_only=True)
class SameBits:
    """Every loss is the same, bit for bit."""

    text = "same loss bits"


@dataclass(frozen=True, kw_only=True)
class Within:
    """The relative difference of every loss is at most `bound`."""

    bound: float

    @property
    def text(self) -> str:
        return f"same loss within {self.bound:g}"


@dataclass(frozen=True, kw_only=True)
class AsGood:
    """At equal supervised tokens, the metric is worse by at most the fraction `bound`. For changes of the rows in a step
    or of the loss itself."""

    bound: float
    metric: str = "loss"
    higher_is_better: bool = False

    @property
    def text(self) -> str:
        return f"{self.metric} no worse than {self.bound:g} at equal tokens"


LossPromise = SameBits | Within | AsGood


@dataclass(frozen=True, kw_only=True)
class Rung:
    """An optimization to try. A file in `rungs` defines one as `RUNG`; it has the name of the file."""

    title: str
    order: int
    """Rungs are tried in ascending order."""
    gain: Gain
    """Its purpose. A rung for safety is kept unless it breaks its promise or costs speed or memory."""
    promise: LossPromise
    propose: Callable[[Situation], Sequence[Change]]
    """Return changes to try one on top of the other until one does not help; raise NotApplicable if there are none."""
