"""Defer an error of the writing process until all processes of a run can raise it."""

from __future__ import annotations

import json

from crosstune.checkpoint.write import SaveFailed
from crosstune.core.errors import UserError
from crosstune.core.events import Event, Observer, StepMetrics
from crosstune.files.run_record import RecordFailed, RecordFailedElsewhere
from crosstune.process.ranks import Group


class DeferredErrors:
    """Errors kept until the next collective: raised earlier in one process, they would leave the others waiting."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.problem: UserError | None = None

    def keep(self, error: UserError) -> None:
        """Raise an error at the next collective in every process, or at once in a run of one process."""
        if self.group.ranks.size == 1:
            raise error
        self.problem = self.problem or error

    def forget_failed_save(self) -> None:
        """Drop the error of a checkpoint that could not be written; it was already reported."""
        if isinstance(self.problem, SaveFailed):
            self.problem = None

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process; raise an error that one of them kept."""
        if self.group.ranks.size == 1:
            return flag
        if not self.group.any(flag or self.problem is not None):
            return False
        if self.group.any(self.problem is not None):
            problem, self.problem = self.problem, None
            text = self.group.share(_to_text(problem))
            raise problem or _from_text(text)
        return True

    def check(self) -> None:
        """Wait for all processes; raise an error that one of them kept."""
        self.any(False)


class KeepingErrors:
    """An observer that defers the errors of a run's record."""

    def __init__(self, observer: Observer, deferred: DeferredErrors) -> None:
        self._observer, self._deferred = observer, deferred

    def on_step(self, metrics: StepMetrics) -> None:
        try:
            self._observer.on_step(metrics)
        except RecordFailed as error:
            self._deferred.keep(error)

    def on_event(self, event: Event) -> None:
        try:
            self._observer.on_event(event)
        except RecordFailed as error:
            self._deferred.keep(error)


def _to_text(problem: UserError | None) -> str:
    if problem is None:
        return ""
    fields = {"message": problem.message, "why": problem.why, "do": problem.do}
    return json.dumps({"record": isinstance(problem, RecordFailed), **fields})


def _from_text(text: str) -> UserError:
    """Return the error of the first process for another one."""
    if not text:  # another process failed
        return SaveFailed(
            "Another process of the run could not write.", do="read the message of that process"
        )
    fields = json.loads(text)
    kind = RecordFailedElsewhere if fields.pop("record") else SaveFailed
    return kind(fields["message"], why=f"the first process could not write: {fields['why']}", do=fields["do"])
