"""Define the interface of a tracker, implemented by the files in `trackers/`, and its events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from crosstune.config.load import launch_variables
from crosstune.core.events import Event

Values = Mapping[str, float]
"""Names such as `train/loss` and `eval/pearson` -> numbers, possibly NaN or infinite."""
Rows = Sequence[Mapping[str, Any]]
"""Rows of a table, all with the same columns."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The run as described to a tracker; secrets are removed from its configuration."""

    name: str
    project: str
    project_asked: bool
    """False for the default project; then use `project_or(VARIABLE)`."""
    entity: str | None
    group: str | None
    folder: Path
    """The run folder, for the tracker's local files unless its environment variables set a different one."""
    id: str
    """An id made for this run in this tracker; a resumed run keeps it. Trackers with other ids store it as a tag."""
    continues: bool
    """True if the tracker already has a run with this id."""
    resumes_at: int
    """The last step before this start; 0 for a new run."""
    config: Mapping[str, Any]

    def project_or(self, variable: str) -> str:
        """Return the requested project, otherwise the value of an environment variable, otherwise the default."""
        return self.project if self.project_asked else launch_variables().get(variable) or self.project


@dataclass(frozen=True, kw_only=True)
class Place:
    """The destination of a run's values."""

    where: str
    """A folder or an address."""
    view: str = ""
    """The command that shows or uploads them."""


class Tracker(Protocol):
    """A tracker, called from one thread: `start`, then any number of logs, then `finish`.

    A file in `trackers/` defines this class `Tracker`, the `PACKAGE` that must be installed, and `ENVIRONMENT`: variables
    that are set before `start` where they are unset.
    """

    repeats: bool
    """True if steps repeated after a resume are logged again, because the tracker replaces the old values."""

    def start(self, run: TrackedRun) -> Place:
        """Open or continue the run and return where its values go; raise `Unavailable` if the tracker cannot run."""
        ...

    def log(self, values: Values, *, step: int) -> None:
        """Log numbers of a step; a step may be logged repeatedly: train, eval, test."""
        ...

    def log_rows(self, name: str, rows: Rows, *, step: int) -> None:
        """Log a table of texts and numbers, such as the samples of an evaluation."""
        ...

    def finish(self, summary: Mapping[str, Any], *, succeeded: bool) -> None:
        """End the run. After a failure, `succeeded` is False and the summary may be empty."""
        ...


class Unavailable(Exception):
    """The tracker cannot run on this machine; the message has the reason and advice."""


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
