"""Decide after an attempt: find the rank that failed first, the message for the user, and whether to restart."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from crosstune.core.errors import (
    EXIT_AT_ONCE,
    EXIT_HUNG,
    EXIT_OUR_FAULT,
    EXIT_PEER_LOST,
    EXIT_PORT_TAKEN,
    EXIT_USER_MUST_ACT,
)

PORT_ATTEMPTS = 4
"""Attempts with a different port after a program took the chosen port."""
_CONTINUE = "  do:  if a checkpoint was saved, run the same command with --resume auto to continue from it"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank that failed."""

    rank: int
    host: str
    code: int
    lines: Sequence[str] = ()
    """The last lines of its output; none for rank 0, because it prints to the terminal."""
    ended: bool = False
    """True if its launcher stopped it after another failure."""

    def sentence(self, size: int) -> str:
        how = f"exited with code {self.code}"
        if self.code < 0:
            how = f"was killed by {signal_name(-self.code)}"
        elif self.code == EXIT_PEER_LOST:
            how = "lost the connection to the others"
        return f"process {self.rank} of {size} (counted from 0, host {self.host}) {how}"

    @property
    def shell_code(self) -> int:
        return self.code if self.code >= 0 else 128 - self.code


@dataclass(frozen=True, kw_only=True)
class Report:
    """The exit codes and failures of one node's ranks."""

    codes: dict[int, int]
    failures: list[Failure] = field(default_factory=list)
    """In the order of failure; ranks that only lost their peers are last."""
    signals: list[int] = field(default_factory=list)
    """The stop signals that the launcher received."""

    @classmethod
    def from_json(cls, data: Any) -> Report:
        """Return the report of another node, which has the same version."""
        return cls(
            codes={int(rank): code for rank, code in data["codes"].items()},
            failures=[Failure(**failure) for failure in data["failures"]],
            signals=data["signals"],
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of an attempt, the same on every node: exit code and messages, or a restart."""

    code: int
    lines: tuple[str, ...] = ()
    """Messages for the user, in addition to the output of rank 0."""
    again: bool = False
    """True if the run starts again."""
    restarts: int = 0
    """Restarts after a failure so far."""


@dataclass(kw_only=True)
class RestartPolicy:
    """Decide after each attempt, and count attempts and restarts."""

    size: int
    max_restarts: int
    port_is_fixed: bool = False
    attempt: int = 0
    restarts: int = 0
    num_ports_taken: int = 0

    def decide(self, reports: Sequence[Report]) -> Outcome:
        """Return the outcome; `reports` starts with the node that failed first.

        Restart after a rank was killed, lost its connection or crashed, but not after a user's mistake, a hang or a signal.
        """
        self.attempt += 1
        codes = [code for report in reports for code in report.codes.values()]
        signals = [number for report in reports for number in report.signals]
        failures = [failure for report in reports for failure in report.failures]
        if not failures:
            return Outcome(code=max(codes))
        cause = _first_cause(failures)
        again = False
        if EXIT_PORT_TAKEN in codes and not signals:
            self.num_ports_taken += 1
            again = not self.port_is_fixed and self.num_ports_taken < PORT_ATTEMPTS
        elif not signals and (cause.code < 0 or cause.code in (EXIT_PEER_LOST, EXIT_OUR_FAULT)):
            again = self.restarts < self.max_restarts
            self.restarts += again
        outcome = _outcome(cause, signals, size=self.size)
        return replace(outcome, again=again, restarts=self.restarts if again else 0)


def lost(node: str, why: str) -> Outcome:
    """Return the outcome after the connection to a node was lost."""
    return Outcome(
        code=EXIT_OUR_FAULT,
        lines=(
            f"the connection to {node} was lost, so the run was aborted.",
            f"  why: {why}: it is down, its launcher was killed, or the network is cut.",
            "  do:  run the same command with --resume auto on every node to continue from the newest checkpoint",
        ),
    )


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _first_cause(failures: Sequence[Failure]) -> Failure:
    """Return the rank that failed first by itself; rank 0 if it failed with the same code, as it printed the reason."""
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
    if cause.code == EXIT_HUNG:  # its watchdog reports the hung rank
        lines = ("the run was aborted because one of its processes hangs.", *shown, _CONTINUE)
        return Outcome(code=EXIT_OUR_FAULT, lines=lines)
    lines = (f"{cause.sentence(size)}, so the others were stopped.", *shown, _CONTINUE)
    return Outcome(code=cause.shell_code, lines=lines)
