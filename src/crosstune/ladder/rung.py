"""Define a rung of the ladder: a change of the options, and what it promises about loss, speed and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from crosstune.config.plan import Plan
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.names import load_plugin, plugin_names

RUNGS_PACKAGE = "crosstune.ladder.rungs"

Change = Mapping[str, Any]
"""Option -> its new value."""
Gain = Literal["speed", "memory", "safety"]


class NotApplicable(Exception):
    """Raised by a rung that cannot apply to a training; its text says why."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a rung decides on: the options that were kept so far, and what they come to on this machine."""

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
    """An optimisation. Its file in `rungs` has the name of the rung and defines it as `RUNG`."""

    title: str
    order: int
    """Rungs are tried from the lowest number on."""
    gain: Gain
    """What it is for. A rung for safety is kept unless it breaks its promise or costs speed or memory."""
    promise: LossPromise
    propose: Callable[[Situation], Sequence[Change]]
    """Return changes to try one on top of the other, until one does not help; raise NotApplicable if there is none."""


def rung_names() -> list[str]:
    """Return the names of all rungs, in the order in which they are tried."""
    names = plugin_names(RUNGS_PACKAGE)
    return sorted(names, key=lambda name: (load_rung(name).order, name))


def load_rung(name: str) -> Rung:
    rung = getattr(load_plugin(RUNGS_PACKAGE, name, kind="rung"), "RUNG", None)
    if not isinstance(rung, Rung):
        raise UserError(f"The rung {name} defines no RUNG.", do=f"see {RUNGS_PACKAGE}")
    return rung
