"""Define rewards: functions, checks, judges and servers that score generated answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ScoredAnswer:
    """An answer with everything that a reward may read."""

    prompt: Sequence[Mapping[str, Any]]
    """The messages of the prompt."""
    answer: str
    """The decoded answer without stop tokens."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the prompt's row."""
    is_text: bool = False
    """True if the prompt's column was text: functions then get text instead of messages."""


class RewardUnavailable(UserError):
    """A reward server did not come back in time. The weights and the state of the last complete step can be saved."""


class Rewards(Protocol):
    """The weighted rewards of a run."""

    @property
    def names(self) -> Sequence[str]:
        """A unique name for each reward, as in the metrics."""

    @property
    def weights(self) -> Sequence[float]: ...

    def score(self, answers: Sequence[ScoredAnswer]) -> NDArray[np.float64]:
        """Return a row for each answer with a score for each reward; nan if a reward has none for the answer."""

    def identity(self) -> str:
        """Return a hash of everything that determines the scores."""

    def close(self) -> None:
        """End child processes and free models."""


def weighted_sum(scores: NDArray[np.float64], weights: Sequence[float]) -> NDArray[np.float64]:
    """Return the reward of each answer: the weighted sum of the scores that exist; nan if none does."""
    weighed = np.asarray(weights, dtype=np.float64)
    counted = weighed != 0  # a reward of weight 0 only observes
    total = np.nansum(scores[:, counted] * weighed[counted], axis=1)
    return np.where(np.isnan(scores[:, counted]).all(axis=1), np.nan, total)
