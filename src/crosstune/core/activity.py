"""Record what a process does now, so that a watchdog can name what a hung one waits in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Activity:
    """The present activity of this process. One thread sets it, others read it."""

    def __init__(self) -> None:
        self.name = "starting"

    def start(self, name: str) -> None:
        """Say what begins now, such as `step 12: backward`."""
        self.name = name

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Say what is done inside the block; the earlier activity goes on after it."""
        before, self.name = self.name, name
        try:
            yield
        finally:
            self.name = before
