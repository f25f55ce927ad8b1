"""Rewards of generated answers for tests of the rl recipe: functions of a text, in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from crosstune.core.rewards import ScoredAnswer
from crosstune.recipes.rl import recipe

Score = Callable[[ScoredAnswer], float]


class FunctionRewards:
    """Weighted functions of an answer; nan means that there is no score."""

    def __init__(self, functions: Mapping[str, Score], weights: Sequence[float] | None = None) -> None:
        self.functions = functions
        self.names = list(functions)
        self.weights = list(weights or [1.0] * len(functions))
        self.num_scored = self.num_closed = 0

    def score(self, answers: Sequence[ScoredAnswer]) -> Any:
        self.num_scored += len(answers)
        found = [[function(answer) for function in self.functions.values()] for answer in answers]
        return np.array(found, dtype=np.float64).reshape(len(answers), len(self.names))

    def identity(self) -> str:
        return f"{self.names} {self.weights}"

    def close(self) -> None:
        self.num_closed += 1


def vowels(answer: ScoredAnswer) -> float:
    """The fraction of vowels: differs between random answers, and can rise."""
    return sum(letter in "aeiou" for letter in answer.answer) / max(1, len(answer.answer))


def use_rewards(
    monkeypatch: pytest.MonkeyPatch, functions: Mapping[str, Score], weights: Sequence[float] | None = None
) -> FunctionRewards:
    """Let the recipe open these rewards."""
    rewards = FunctionRewards(functions, weights)
    monkeypatch.setattr(recipe, "open_rewards", lambda *args, **parts: rewards)
    return rewards
