"""Start the ranks of a run on this node, forward signals, stop them together, and restart them from the newest checkpoint.

torch's elastic agent knows neither checkpoints nor why a process stopped, and its restarts often fail on gloo.
"""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from crosstune.config.load import child_environment
from crosstune.core.errors import (
    EXIT_DONE,
    EXIT_HUNG,
    EXIT_PEER_LOST,
    EXIT_PORT_TAKEN,
    EXIT_STOPPED,
    LONGEST_TEXT,
)
from crosstune.distributed.attempts import Failure, Outcome, Report
from crosstune.distributed.coordinator import Coordinator
from crosstune.distributed.environment import ATTEMPT, LAUNCH_FOLDER, LAUNCHER, Nodes
from crosstune.distributed.links import AttemptLayout, MultiNode, SingleNode
from crosstune.distributed.master import free_ports
from crosstune.distributed.watchdog import FolderBoard, LauncherWatch
from crosstune.process.this_process import handling

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
            # Only SIGINT: schedulers send several other signals for one stop.
            again = self.signals.count(signal.SIGINT) > 1
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


LOST_S = 30.0
"""Silence after which another node's launcher counts as lost."""
ORPHAN_S = 300.0
"""Time for a rank to save and exit after its launcher exits."""

Environments = Callable[[Path, AttemptLayout], list[dict[str, str]]]
"""Private folder and attempt -> the environment variables of each rank on this node."""
Say = Callable[[Sequence[str]], None]


def launch(
    command: Sequence[str],
    *,
    num_local: int,
    environments: Environments,
    nodes: Nodes | None = None,
    max_restarts: int = 0,
    connect_s: float = 300.0,
    collective_s: float = 1800.0,
    port: int | None = None,
    say: Say = lambda lines: None,
    note: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Run `command` as the ranks of this node, and restart them after a failure.

    With `nodes`, each node has a launcher. Rank 0 has our terminal; the output of another rank is shown if it fails. `say`
    prints restarts, and `note` prints on nodes without rank 0, whose output would otherwise be empty. On a single node the
    ranks meet at `port`, by default a free port.
    """
    link: SingleNode | MultiNode
    if nodes is None or nodes.num_nodes == 1:
        link = SingleNode(size=num_local, max_restarts=max_restarts, port=port)
    else:
        lost_s = min(LOST_S, collective_s)
        if nodes.node_rank == 0:
            Coordinator(nodes=nodes, max_restarts=max_restarts, connect_s=connect_s, lost_s=lost_s).start()
        link = MultiNode(nodes, num_local=num_local, connect_s=connect_s, lost_s=lost_s)
    signals: list[int] = []
    with tempfile.TemporaryDirectory(prefix="crosstune-ranks-") as name, _passing(signals) as started:
        folder = Path(name)
        while True:
            begin = link.begin(lambda: bool(signals))
            if begin is None:
                line = f"stopped by {signal.Signals(signals[0]).name} before the processes were started."
                return Outcome(code=128 + signals[0], lines=(line,))
            if isinstance(begin, Outcome):
                return begin
            if begin.node_rank and begin.attempt == 0:
                note(
                    joined_line(
                        node=f"node {begin.node_rank} of {begin.num_nodes}",
                        ranks=range(begin.first_rank, begin.first_rank + begin.num_local),
                        size=begin.size,
                        master_addr=begin.master_addr,
                    )
                )
            processes = Processes(folder=folder, first_rank=begin.first_rank, signals=signals)
            started.append(processes)
            board = FolderBoard(folder)
            board.clear()
            processes.start(command, environments(folder, begin))
            processes.wait(link.should_stop, LauncherWatch(board, limit_s=collective_s).verdict)
            outcome = link.decide(processes.report())
            if not outcome.again:
                if begin.node_rank and not outcome.lines:
                    how = "all processes finished" if outcome.code == 0 else f"exit code {outcome.code}"
                    note(f"left     the run: {how}; node 0 printed the result")
                return outcome
            if outcome.restarts and outcome.lines:
                cause, *rest = outcome.lines
                again = f"Starting again from the newest checkpoint (restart {outcome.restarts} of {max_restarts})."
                say([f"{cause} {again}", *(line for line in rest if not line.startswith("  do:"))])


def joined_line(*, node: str, ranks: Sequence[int], size: int, master_addr: str) -> str:
    """Return the line of a node without rank 0, which has no progress to print."""
    some = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    return f"joined   as {node}, {some} of {size}; node 0 ({master_addr}) prints the progress"


@contextlib.contextmanager
def _passing(signals: list[int]) -> Iterator[list[Processes]]:
    """Forward stop signals to the processes of the newest attempt; kill processes that still run at the end."""
    started: list[Processes] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        for processes in started[-1:]:
            processes.send(number)

    with handling(pass_on):
        try:
            yield started
        finally:
            for processes in started:
                processes.end(signal.SIGKILL)


def ring_environments(folder: Path, begin: AttemptLayout) -> list[dict[str, str]]:
    """Return the variables of an MLX ring on loopback."""
    hostfile = folder / "hosts.json"
    ports = free_ports(begin.size)
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]), encoding="utf-8")
    return [
        {"MLX_HOSTFILE": str(hostfile), "MLX_RANK": str(rank), ATTEMPT: str(begin.attempt)}
        for rank in range(begin.size)
    ]


def torch_environments(folder: Path, begin: AttemptLayout) -> list[dict[str, str]]:
    """Return the variables of torch ranks, as torchrun sets them."""
    return [
        {
            "RANK": str(begin.first_rank + place),
            "WORLD_SIZE": str(begin.size),
            "LOCAL_RANK": str(place),
            "LOCAL_WORLD_SIZE": str(begin.num_local),
            "GROUP_RANK": str(begin.node_rank),
            "GROUP_WORLD_SIZE": str(begin.num_nodes),
            "MASTER_ADDR": begin.master_addr,
            "MASTER_PORT": str(begin.port),
            ATTEMPT: str(begin.attempt),
        }
        for place in range(begin.num_local)
    ]


def follow(launcher: int) -> None:
    """Stop this process when its launcher exits: SIGTERM, and SIGKILL `ORPHAN_S` later."""

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
