"""Run the ranks of one attempt on this node: start them, forward signals, and stop them together."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crosstune.config.load import child_environment
from crosstune.core.errors import (
    EXIT_DONE,
    EXIT_HUNG,
    EXIT_PEER_LOST,
    EXIT_PORT_TAKEN,
    EXIT_STOPPED,
    LONGEST_TEXT,
)
from crosstune.distributed.attempts import Failure, Report
from crosstune.distributed.environment import LAUNCH_FOLDER, LAUNCHER

PATIENCE_S = 5.0
"""Time for the other processes to save and exit after one failed."""
GRACE_S = 30.0
"""Time between SIGTERM and SIGKILL."""
POLL_S = 0.05
TAIL_LINES, TAIL_BYTES = 15, 2**16
"""The end of a failed rank's output that is shown."""
_ORDERLY = (EXIT_DONE, EXIT_STOPPED)


@dataclass(kw_only=True)
class Processes:
    """The ranks of one attempt on this node."""

    folder: Path
    first_rank: int = 0
    signals: list[int] = field(default_factory=list)
    """The signals that the launcher received, in order."""
    members: list[subprocess.Popen[bytes]] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    """Indices of failed members, in the order of their failures."""
    ended: set[int] = field(default_factory=set)
    """Indices of members that the launcher stopped."""
    hung: list[str] = field(default_factory=list)
    """The launcher watchdog's lines about a rank that hangs."""

    def start(self, command: Sequence[str], variables: Sequence[Mapping[str, str]]) -> None:
        """Start a process for each set of environment variables. Rank 0 has our terminal."""
        added = {LAUNCHER: str(os.getpid()), LAUNCH_FOLDER: str(self.folder)}
        for place, own in enumerate(variables):
            is_quiet = self.first_rank + place > 0
            with self._log(place).open("wb") if is_quiet else contextlib.nullcontext() as log:
                self.members.append(
                    subprocess.Popen(
                        command,
                        env=child_environment({**own, **added}),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,  # Ctrl-C reaches them once, through us
                    )
                )
        for number in list(self.signals):  # received during the start
            self.send(number)

    def codes(self) -> list[int | None]:
        return [member.poll() for member in self.members]

    def wait(self, should_stop: Callable[[bool], bool], hangs: Callable[[], Sequence[str]] = tuple) -> None:
        """Wait until all processes have exited.

        After a failure the others get `PATIENCE_S`, then SIGTERM, and SIGKILL after `GRACE_S`; less after a second Ctrl-C,
        a port in use, a hang, or a failure on another node, as `should_stop(failed_here)` returns.
        """
        ending_at: float | None = None
        while None in self.codes():
            self._note_failures()
            elsewhere = should_stop(bool(self.failures))
            again = (
                self.signals.count(signal.SIGINT) > 1
            )  # schedulers send several other signals for one stop
            self.hung = list(hangs())
            if self.hung or EXIT_HUNG in self.codes():
                self.end(signal.SIGKILL)
            if ending_at is None and (self.failures or again or elsewhere):
                quick = again or EXIT_PORT_TAKEN in self.codes()
                ending_at = time.monotonic() + (0.0 if quick else PATIENCE_S)
            late_s = time.monotonic() - ending_at if ending_at is not None else -1.0
            if late_s > (PATIENCE_S if again else 0.0 if elsewhere else GRACE_S):
                self.end(signal.SIGKILL)
            elif late_s > 0:
                self.end(signal.SIGTERM)
            time.sleep(POLL_S)
        self._note_failures()

    def report(self) -> Report:
        """Return the exit codes and failures, after `wait`."""
        codes = [code or 0 for code in self.codes()]
        host, first = socket.gethostname(), self.first_rank
        # A report must fit in one message, so only the first few failures have lines.
        causes = [place for place in self.failures if codes[place] != EXIT_PEER_LOST][:4] or self.failures[:1]
        failures = [
            Failure(
                rank=first + place,
                host=host,
                code=codes[place],
                lines=self._tail(place) if place in causes else (),
                ended=place in self.ended,
            )
            for place in self.failures
        ]
        if self.hung:
            failures = [Failure(rank=first, host=host, code=EXIT_HUNG, lines=self.hung)]
        numbered = {first + place: code for place, code in enumerate(codes)}
        return Report(codes=numbered, failures=failures, signals=list(self.signals))

    def end(self, number: int) -> None:
        """Send a signal to running processes, SIGTERM only once; wait for killed processes."""
        for place, member in enumerate(self.members):
            if member.poll() is None and (number == signal.SIGKILL or place not in self.ended):
                member.send_signal(number)
                self.ended.add(place)
                if number == signal.SIGKILL:
                    member.wait()

    def send(self, number: int) -> None:
        for member in self.members:
            member.send_signal(number)

    def _note_failures(self) -> None:
        codes = self.codes()
        new = [
            p for p, c in enumerate(codes) if c is not None and c not in _ORDERLY and p not in self.failures
        ]
        self.failures += sorted(new, key=lambda place: codes[place] == EXIT_PEER_LOST)

    def _log(self, place: int) -> Path:
        return self.folder / f"rank-{self.first_rank + place}.log"

    def _tail(self, place: int) -> list[str]:
        if self.first_rank + place == 0:
            return []  # printed already
        with self._log(place).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
        return [line[-LONGEST_TEXT:] for line in lines[-TAIL_LINES:]]
