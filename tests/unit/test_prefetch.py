"""Windows are prepared ahead in a thread; the loop gets the same windows in order, and every error."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from crosstune.core.protocols import PreparedBatch
from crosstune.loop.prefetch import DEPTH, Prefetch


@dataclass(frozen=True)
class Number:
    value: int
    weight: int = 1
    num_tokens: int = 1


@dataclass
class Numbers:
    """A recipe and a session in one: each step is its number, twice."""

    steps: int
    bad: int = -1
    made: list[int] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def num_steps(self) -> int:
        return self.steps

    def micro_batches(self, step: int) -> Sequence[Number]:
        if step == self.bad:
            raise ValueError("this step cannot be made")
        self.made.append(step)
        self.threads.add(threading.get_ident())
        return [Number(step), Number(step)]

    def prepare(self, batch: Number) -> PreparedBatch:
        return PreparedBatch(weight=batch.weight, num_tokens=1, arrays={"value": batch.value})


def open_prefetch(numbers: Any, *, first: int = 0) -> Prefetch:
    return Prefetch(numbers, numbers, first=first)


def values(window: Sequence[PreparedBatch]) -> list[int]:
    return [batch.arrays["value"] for batch in window]


def test_windows_come_in_order_from_another_thread() -> None:
    numbers = Numbers(7)
    prefetch = open_prefetch(numbers, first=2)
    assert [values(prefetch.micro_batches()) for _ in range(5)] == [[step, step] for step in range(2, 7)]
    prefetch.close()
    assert numbers.made == [2, 3, 4, 5, 6] and threading.get_ident() not in numbers.threads


def test_only_a_few_are_made_ahead() -> None:
    numbers = Numbers(1000)
    prefetch = open_prefetch(numbers)
    prefetch.micro_batches()
    while len(numbers.made) < 1 + DEPTH:
        time.sleep(0.001)
    time.sleep(0.05)
    prefetch.close()
    assert len(numbers.made) == 1 + DEPTH


def test_an_error_comes_up_at_its_step() -> None:
    numbers = Numbers(9, bad=2)
    prefetch = open_prefetch(numbers)
    assert values(prefetch.micro_batches()) == [0, 0]
    assert values(prefetch.micro_batches()) == [1, 1]
    with pytest.raises(ValueError, match="cannot be made"):
        prefetch.micro_batches()
    prefetch.close()


def test_closing_ends_the_thread_whatever_is_left() -> None:
    before = set(threading.enumerate())
    for _ in range(20):
        open_prefetch(Numbers(50)).close()
    assert not set(threading.enumerate()) - before
