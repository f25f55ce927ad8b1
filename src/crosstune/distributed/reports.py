"""Judge how the ranks of an attempt ended: which one failed first, what to tell the user, whether to start again."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from crosstune.core.errors import (
    EXIT_AT_ONCE,
    EXIT_HUNG,
    EXIT_OUR_FAULT,
    EXIT_PEER_LOST,
    EXIT_PORT_TAKEN,
    EXIT_USER_MUST_ACT,
    shown,
)

PORT_ATTEMPTS = 4
"""The number of starts at other ports, when one that was free is taken by another program."""
_CONTINUE = "  do:  if a checkpoint was saved, run the same command with --resume auto to continue from it"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank that failed."""

    rank: int
    host: str
    code: int
    lines: Sequence[str] = ()
    """The last lines of its output; none for rank 0, which has the terminal."""
    ended: bool = False
    """True if its launcher stopped it, after another one had failed."""

    def sentence(self, size: int) -> str:
        how = f"was killed by {signal_name(-self.code)}" if self.code < 0 else f"ended with code {self.code}"
        if self.code == EXIT_PEER_LOST:
            how = "lost the connection to the others"
        return f"process {self.rank} of {size} (counted from 0, host {self.host}) {how}"

    @property
    def shell_code(self) -> int:
        return self.code if self.code >= 0 else 128 - self.code


@dataclass(frozen=True, kw_only=True)
class Report:
    """The end of the ranks of one machine."""

    codes: dict[int, int]
    failures: list[Failure] = field(default_factory=list)
    """By the order in which they failed; those that only lost the others come last."""
    signals: list[int] = field(default_factory=list)
    """The stop signals that the launcher received."""

    def to_json(self, *, limit: int) -> dict[str, Any]:
        """Return the report as JSON of at most `limit` bytes: the output of the ranks that failed last is left out."""
        data = dataclasses.asdict(self)
        lines = [failure.pop("lines") for failure in data["failures"]]
        left = limit - len(json.dumps(data))
        for failure, own in zip(data["failures"], lines, strict=True):
            left -= len(json.dumps({"lines": own}))
            failure["lines"] = own if left >= 0 else []
        return data

    @classmethod
    def from_json(cls, data: Any) -> Report:
        """Return the report of another machine; raise ValueError for anything else."""
        try:
            failures = [_read_failure(failure) for failure in data["failures"]]
            codes = {int(rank): _integer(code) for rank, code in data["codes"].items()}
            return cls(codes=codes, failures=failures, signals=[_integer(one) for one in data["signals"]])
        except (TypeError, AttributeError, LookupError) as error:
            raise ValueError(f"it is no report: {error!r}") from error


def _read_failure(data: Any) -> Failure:
    return Failure(
        rank=_integer(data["rank"]),
        host=str(data["host"]),
        code=_integer(data["code"]),
        lines=[str(line) for line in data["lines"]],
        ended=data["ended"] is True,
    )


def _integer(value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError(f"{shown(value)} is not an integer")
    return value


@dataclass(frozen=True, kw_only=True)
class Outcome:
    code: int
    lines: tuple[str, ...] = ()
    """Messages for the user, in addition to those of rank 0."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The decision after an attempt."""

    outcome: Outcome
    cause: Failure | None = None
    again: bool = False
    """True to start the ranks again, from the newest checkpoint."""
    other_port: bool = False
    """True to start them again because a port was taken, before anything happened."""


def judge(reports: Sequence[Report], *, size: int, restarts_left: int) -> Verdict:
    """Return what follows from the reports of all machines; the machine that reported a failure first comes first."""
    codes = {rank: code for report in reports for rank, code in report.codes.items()}
    signals = [number for report in reports for number in report.signals]
    failures = [failure for report in reports for failure in report.failures]
    if not failures:
        return Verdict(outcome=Outcome(code=max(codes.values())))
    cause = _first_cause(failures)
    outcome = _outcome(cause, signals, size=size)
    if EXIT_PORT_TAKEN in codes.values() and not signals:
        return Verdict(outcome=outcome, cause=cause, other_port=True)
    again = not signals and restarts_left > 0 and is_restartable(cause.code)
    return Verdict(outcome=outcome, cause=cause, again=again)


def is_restartable(code: int) -> bool:
    """Return whether starting again may help: after a kill, a lost connection or a crash, not after a user's mistake or
    a hang."""
    return code < 0 or code in (EXIT_PEER_LOST, EXIT_OUR_FAULT)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _first_cause(failures: Sequence[Failure]) -> Failure:
    """Return the rank that failed first on its own; rank 0 if it failed in the same way, as it printed the reason."""
    own = [failure for failure in failures if not failure.ended] or list(failures)
    first = next((failure for failure in own if failure.code != EXIT_PEER_LOST), own[0])
    return next((failure for failure in own if failure.rank == 0 and failure.code == first.code), first)


def _outcome(cause: Failure, signals: Sequence[int], *, size: int) -> Outcome:
    if signals.count(signal.SIGINT) > 1:
        return Outcome(code=EXIT_AT_ONCE, lines=("stopped at once.",))
    if -cause.code in signals:
        return Outcome(
            code=cause.shell_code, lines=(f"stopped by {signal_name(-cause.code)} before it began.",)
        )
    if cause.rank == 0 and cause.code in (EXIT_USER_MUST_ACT, EXIT_PORT_TAKEN):
        return Outcome(code=EXIT_USER_MUST_ACT)  # it has printed the reason
    shown = [f"  {cause.rank} | {line}" for line in cause.lines]
    if cause.code == EXIT_HUNG:  # its watchdog says who hangs
        lines = ("the run was ended, because one of its processes hangs.", *shown, _CONTINUE)
        return Outcome(code=EXIT_OUR_FAULT, lines=lines)
    lines = (f"{cause.sentence(size)}, so the others were stopped.", *shown, _CONTINUE)
    return Outcome(code=cause.shell_code, lines=lines)
