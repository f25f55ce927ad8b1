"""Define the events of trackers, and how to recognise their threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from crosstune.core.events import Event

TRACKER_THREAD = "tracker "
"""The prefix of the names of tracker threads."""


def in_tracker_thread() -> bool:
    """Return whether this is the thread of a tracker; its output is dropped, and it has no input."""
    return threading.current_thread().name.startswith(TRACKER_THREAD)


@dataclass(frozen=True, kw_only=True)
class TrackingStarted(Event):
    """A tracker receives the run."""

    kind = "tracking"
    tracker: str
    where: str
    """A folder or an address."""
    view: str = ""
    """The command that shows or uploads the values."""


@dataclass(frozen=True, kw_only=True)
class TrackingFailed(Event):
    """A tracker failed; the run continues without it."""

    kind = "tracking_failed"
    tracker: str
    error: str
    step: int


@dataclass(frozen=True, kw_only=True)
class TrackingWaits(Event):
    """The run has ended, and trackers still have values to send."""

    kind = "tracking_waits"
    trackers: Sequence[str]
    seconds: float
    """The maximum wait."""
