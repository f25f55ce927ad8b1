"""Rewards opened from the text of --reward, with their events, and the scores of answers to one question."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from crosstune.config.load import make_config
from crosstune.core.events import Event, RewardPrinted, StepMetrics, Warned
from crosstune.core.rewards import ScoredAnswer
from crosstune.recipes.rl.rewards.open_rewards import OpenedRewards, open_rewards

QUESTION = [{"role": "user", "content": "What is 40 + 2?"}]


@dataclass
class Seen:
    """An observer that keeps the events."""

    events: list[Event] = field(default_factory=list)

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def on_step(self, metrics: StepMetrics) -> None: ...

    @property
    def warnings(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Warned)]

    @property
    def printed(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, RewardPrinted))


Open = Callable[..., OpenedRewards]


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def open_(seen: Seen) -> Iterator[Open]:
    """Open rewards that are closed at the end of the test."""
    opened: list[OpenedRewards] = []

    def open_these(reward: str, **options: Any) -> OpenedRewards:
        def no_judge(name: str, *, backend: str) -> Any:
            raise AssertionError("no judge is asked for")

        config = make_config(reward=reward, **options)
        opened.append(open_rewards(config, backend="cpu", observer=seen, open_judge=no_judge))
        return opened[-1]

    yield open_these
    for one in opened:
        one.close()


def answers(*texts: str, is_text: bool = False, **columns: Any) -> list[ScoredAnswer]:
    return [
        ScoredAnswer(prompt=QUESTION, answer=text, columns=dict(columns), is_text=is_text) for text in texts
    ]


def scores(rewards: OpenedRewards, *texts: str, **columns: Any) -> list[float]:
    """Return the scores of the first reward; None for nan."""
    return [
        None if np.isnan(one) else one for one in rewards.score(answers(*texts, **columns))[:, 0].tolist()
    ]
