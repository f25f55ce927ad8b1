"""Record the current activity of a process, so that a watchdog can name where it hangs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Activity:
    """The current activity of this process, set by one thread and read by others."""

    def __init__(self) -> None:
        self.name = "starting"

    def start(self, name: str) -> None:
        """Set the activity, such as `step 12: backward`."""
        self.name = name

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Set the activity inside the block, and restore the earlier one after it."""
        before, self.name = self.name, name
        try:
            yield
        finally:
            self.name = before
