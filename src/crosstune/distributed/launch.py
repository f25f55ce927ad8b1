"""Start a run as several processes on this machine, forward signals, and stop them together."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from crosstune.config.load import child_environment
from crosstune.core.errors import (
    EXIT_AT_ONCE,
    EXIT_DONE,
    EXIT_PEER_LOST,
    EXIT_PORT_TAKEN,
    EXIT_STOPPED,
    EXIT_USER_MUST_ACT,
)
from crosstune.core.signals import taken_signals
from crosstune.distributed.environment import LAUNCHER

NUM_ATTEMPTS = 4
PATIENCE_S = 5.0
"""Time for the others to save and exit after one process failed."""
GRACE_S = 30.0
"""Time between SIGTERM and SIGKILL."""
POLL_S = 0.05
TAIL_LINES = 15
_ORDERLY = (EXIT_DONE, EXIT_STOPPED)

Environments = Callable[[Path, Sequence[int]], list[dict[str, str]]]
"""(private folder, a free port for each rank) -> the environment variables of each rank."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    code: int
    lines: tuple[str, ...] = ()
    """Messages for the user, in addition to those of rank 0."""


def launch(command: Sequence[str], *, size: int, environments: Environments) -> Outcome:
    """Run `command` as `size` processes. Rank 0 has our terminal; the output of the others is shown if they fail."""
    for attempt in range(1, NUM_ATTEMPTS + 1):
        with tempfile.TemporaryDirectory(prefix="crosstune-ranks-") as name:
            processes = _Processes(folder=Path(name))
            variables = environments(Path(name), _free_ports(size))
            with processes.passing_signals():
                processes.start(command, variables)
                processes.wait()
            if EXIT_PORT_TAKEN not in processes.codes() or processes.signals or attempt == NUM_ATTEMPTS:
                return processes.outcome()
    raise AssertionError("the last attempt returns")


def ring_environments(folder: Path, ports: Sequence[int]) -> list[dict[str, str]]:
    """Return the variables of an MLX ring on the loopback device."""
    hostfile = folder / "hosts.json"
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]), encoding="utf-8")
    return [{"MLX_HOSTFILE": str(hostfile), "MLX_RANK": str(rank)} for rank in range(len(ports))]


def follow(launcher: int) -> None:
    """Send this process SIGTERM when its launcher is gone."""

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


@dataclass(kw_only=True)
class _Processes:
    """The processes of one attempt."""

    folder: Path
    members: list[subprocess.Popen[bytes]] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)
    """The signals that we received, in order."""
    failures: list[int] = field(default_factory=list)
    """Ranks that failed, in the order in which we noticed."""
    ended: set[int] = field(default_factory=set)
    """Ranks that we stopped."""

    def start(self, command: Sequence[str], variables: Sequence[dict[str, str]]) -> None:
        for rank, added in enumerate(variables):
            with contextlib.ExitStack() as stack:
                log = stack.enter_context(self._log(rank).open("wb")) if rank else None
                self.members.append(
                    subprocess.Popen(
                        command,
                        env=child_environment({**added, LAUNCHER: str(os.getpid())}),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,  # they receive Ctrl-C once, from us
                    )
                )
        for number in list(self.signals):  # received while they were started
            self._send(number)

    def codes(self) -> list[int | None]:
        return [member.poll() for member in self.members]

    def wait(self) -> None:
        """Wait until all processes have ended. When one fails, the others get some time, then SIGTERM, then SIGKILL; a
        second signal from the user, or a port in use at the start, shortens this."""
        ending_at: float | None = None
        while None in self.codes():
            self._note_failures()
            again = self._stopped_again()
            if ending_at is None and (self.failures or again):
                quick = again or EXIT_PORT_TAKEN in self.codes()
                ending_at = time.monotonic() + (0.0 if quick else PATIENCE_S)
            late_s = time.monotonic() - ending_at if ending_at is not None else -1.0
            if late_s > (PATIENCE_S if again else GRACE_S):
                self._end(signal.SIGKILL)
            elif late_s > 0:
                self._end(signal.SIGTERM)
            time.sleep(POLL_S)
        self._note_failures()

    def outcome(self) -> Outcome:
        codes = [code if code is not None else 0 for code in self.codes()]
        if not self.failures:
            return Outcome(code=max(codes))
        rank = self._first_failure(codes)
        code = codes[rank]
        shell_code = code if code >= 0 else 128 - code
        if self._stopped_again():
            return Outcome(code=EXIT_AT_ONCE, lines=("stopped at once.",))
        if -code in self.signals:
            return Outcome(
                code=shell_code, lines=(f"stopped by {signal.Signals(-code).name} before it began.",)
            )
        if rank == 0 and code == EXIT_USER_MUST_ACT:
            return Outcome(code=code)  # it has printed the reason
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        lines = [f"process {rank} of {len(codes)} (counted from 0) {how}, so the others were stopped."]
        lines += [f"  {rank} | {line}" for line in self._tail(rank)]
        return Outcome(
            code=shell_code,
            lines=(
                *lines,
                "  do:  if a checkpoint was saved, run the same command with --resume auto to continue from it",
            ),
        )

    @contextlib.contextmanager
    def passing_signals(self) -> Iterator[None]:
        """Forward the stop signals to every process; kill all processes that are left when the block ends."""

        def pass_on(number: int, frame: FrameType | None) -> None:
            self.signals.append(number)
            self._send(number)

        previous = {number: signal.signal(number, pass_on) for number in taken_signals()}
        try:
            yield
        finally:
            self._end(signal.SIGKILL)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _stopped_again(self) -> bool:
        """Return whether the user asked twice. A scheduler may send several signals for one stop."""
        return self.signals.count(signal.SIGINT) > 1

    def _send(self, number: int) -> None:
        for member in self.members:
            member.send_signal(number)

    def _note_failures(self) -> None:
        codes = self.codes()
        new = [
            r for r, c in enumerate(codes) if c is not None and c not in _ORDERLY and r not in self.failures
        ]
        self.failures += sorted(new, key=lambda rank: codes[rank] == EXIT_PEER_LOST)

    def _first_failure(self, codes: Sequence[int]) -> int:
        """Return the rank that failed first on its own; rank 0 if it failed in the same way, as it printed the reason."""
        itself = [r for r in self.failures if r not in self.ended and codes[r] != EXIT_PEER_LOST]
        rank = (itself or self.failures)[0]
        return 0 if 0 not in self.ended and codes[0] == codes[rank] else rank

    def _end(self, number: int) -> None:
        for rank, member in enumerate(self.members):
            if member.poll() is None and (number == signal.SIGKILL or rank not in self.ended):
                member.send_signal(number)
                self.ended.add(rank)
                if number == signal.SIGKILL:
                    member.wait()

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def _tail(self, rank: int) -> list[str]:
        if rank == 0:
            return []
        return self._log(rank).read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]


def _free_ports(count: int) -> list[int]:
    """Return free ports; each stays bound until all are found, so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) for _ in range(count)
        ]
        for found in sockets:
            found.bind(("127.0.0.1", 0))
        return [int(found.getsockname()[1]) for found in sockets]
