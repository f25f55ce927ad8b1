"""Define what a tracker does: the interface of the files in `trackers/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from crosstune.config.load import launch_variables

Values = Mapping[str, float]
"""Names such as `train/loss` and `eval/pearson` -> numbers; NaN and infinities are possible."""
Rows = Sequence[Mapping[str, Any]]
"""Rows of a table, all with the same columns."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker is told about a run when it starts. Secrets are removed from the configuration."""

    name: str
    project: str
    project_asked: bool
    """False for the default project, which a tracker's own variable replaces."""
    entity: str | None
    group: str | None
    folder: Path
    """The run folder; a tracker keeps its local files in there, unless its own variables say otherwise."""
    id: str
    """The identity of the run with the tracker; a resumed run has the one that it had before."""
    continues: bool
    """True if the tracker was given this id before."""
    resumes_at: int
    """The last step before this start; 0 for a new run."""
    config: Mapping[str, Any]

    def project_or(self, variable: str) -> str:
        """Return the project: the one that was asked for, that of an environment variable, or the default."""
        return self.project if self.project_asked else launch_variables().get(variable) or self.project


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the values of a run go."""

    where: str
    """A folder or an address."""
    view: str = ""
    """The command that shows or uploads them."""


class Tracker(Protocol):
    """One tracker. Its calls come from one thread, in this order: `start`, any number of logs, `finish`.

    A file in `trackers/` has a class `Tracker` of this kind, the `PACKAGE` that it imports when it starts, and the
    variables of its `ENVIRONMENT` that are set where the user has not set them.
    """

    repeats: bool
    """True if steps that were logged before a resume are to be logged again: the tracker replaces the old ones."""

    def start(self, run: TrackedRun) -> Place: ...

    def log(self, values: Values, *, step: int) -> None: ...

    def log_rows(self, name: str, rows: Rows, *, step: int) -> None:
        """Log a table of texts and numbers, such as the samples of an evaluation."""
        ...

    def finish(self, summary: Mapping[str, Any], *, succeeded: bool) -> None:
        """End the run; `succeeded` is False for one that failed or was killed, whose summary may be empty."""
        ...


class Unavailable(Exception):
    """A tracker cannot run here; the message says why and what to do."""
