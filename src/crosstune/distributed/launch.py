"""Start the ranks of a run on this node, and restart them from the newest checkpoint after a failure.

torch's elastic agent knows neither checkpoints nor why a process stopped, and its restarts often fail on gloo.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from crosstune.distributed.attempts import Outcome
from crosstune.distributed.coordinator import Coordinator
from crosstune.distributed.environment import ATTEMPT, Nodes
from crosstune.distributed.links import AttemptLayout, MultiNode, SingleNode
from crosstune.distributed.master import free_ports
from crosstune.distributed.processes import Processes
from crosstune.distributed.watchdog import FolderBoard, LauncherWatch
from crosstune.process.this_process import handling

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
                last = begin.first_rank + begin.num_local - 1
                some = f"rank {last}" if begin.num_local == 1 else f"ranks {begin.first_rank} to {last}"
                note(
                    f"joined   as node {begin.node_rank} of {begin.num_nodes}, {some} of {begin.size}; node 0 "
                    f"({begin.master_addr}) prints the progress"
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
