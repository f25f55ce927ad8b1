"""Measure the recent pace of a training: tokens per second and seconds per step."""

from __future__ import annotations

from collections import deque

WINDOW_S = 60.0
MIN_STEPS = 3


class RecentPace:
    """The pace over the steps of the last minute, or over the last three when they take longer.

    An average over the whole run would not show that a machine slowed down.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque()
        self._seconds, self._tokens = 0.0, 0
        self._warm = False

    def add(self, *, step_s: float, tokens: int) -> None:
        if not self._warm and self._steps:  # the first step includes warm-up: forget it once there is another
            self._drop_oldest()
            self._warm = True
        self._steps.append((step_s, tokens))
        self._seconds, self._tokens = self._seconds + step_s, self._tokens + tokens
        while len(self._steps) > MIN_STEPS and self._seconds - self._steps[0][0] >= WINDOW_S:
            self._drop_oldest()

    def tokens_per_s(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    def step_s(self) -> float:
        return self._seconds / len(self._steps) if self._steps else 0.0

    def _drop_oldest(self) -> None:
        seconds, tokens = self._steps.popleft()
        self._seconds, self._tokens = self._seconds - seconds, self._tokens - tokens
        if not self._steps:
            self._seconds, self._tokens = 0.0, 0
