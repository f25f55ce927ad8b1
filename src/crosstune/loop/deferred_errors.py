"""Defer an error of the writing rank until all ranks of a run can raise it."""

from __future__ import annotations

import json

from crosstune.checkpoint.write import SaveFailed
from crosstune.core.errors import UserError
from crosstune.core.events import Event, Observer, StepMetrics
from crosstune.files.run_record import RecordFailed, RecordFailedElsewhere
from crosstune.process.ranks import Group


class DeferredErrors:
    """Errors kept until the next collective: raised earlier on one rank, they would leave the others waiting."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.problem: UserError | None = None

    def keep(self, error: UserError) -> None:
        """Raise an error at the next collective on every rank, or immediately in a single-process run."""
        if self.group.ranks.size == 1:
            raise error
        self.problem = self.problem or error

    def forget_failed_save(self) -> None:
        """Drop the error of a failed save, which was already reported."""
        if isinstance(self.problem, SaveFailed):
            self.problem = None

    def any(self, flag: bool) -> bool:
        """Return True if the flag is set on any rank; raise an error that one of them kept."""
        if self.group.ranks.size == 1:
            return flag
        if not self.group.any(flag or self.problem is not None):
            return False
        if self.group.any(self.problem is not None):
            problem, self.problem = self.problem, None
            fields = [problem.message, problem.why, problem.do] if problem is not None else []
            shared = json.loads(
                self.group.broadcast(json.dumps([isinstance(problem, RecordFailed), *fields]))
            )
            raise problem or _error_of_rank_0(*shared)
        return True

    def check(self) -> None:
        """Wait for all ranks; raise an error that one of them kept."""
        self.any(False)


class DeferringObserver:
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


def _error_of_rank_0(of_record: bool, message: str = "", why: str = "", do: str = "") -> UserError:
    """Return the error of rank 0 for a different rank; without a message, yet another rank failed."""
    if not message:
        return SaveFailed("Another rank could not write.", do="read the message of that rank")
    kind = RecordFailedElsewhere if of_record else SaveFailed
    return kind(message, why=f"rank 0 could not write: {why}", do=do)
