"""Supervise a job's launchers: forward signals, stop all when one fails, restart from the last checkpoint."""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from crosstune.core.errors import EXIT_AT_ONCE, EXIT_DONE, EXIT_PEER_LOST, EXIT_STOPPED, EXIT_USER_MUST_ACT
from crosstune.distributed.jobs.job import Started
from crosstune.process.this_process import handling

PATIENCE_S = 5.0
"""Time for the other nodes to exit by themselves after one failed."""
GRACE_S = 60.0
"""Time between SIGTERM and SIGKILL."""
POLL_S = 0.2
SETTLE_S = 3.0
"""Wait before a restart: processes left on a lost node exit meanwhile and release the run folder."""
LOST = 255
"""The exit code of a lost node; ssh uses it for a broken connection."""


class Node(Protocol):
    """The launcher of one node."""

    host: str
    lines: deque[str]
    """The last output that was not shown."""

    def poll(self) -> int | None:
        """Return the exit code, LOST for a lost node; None while it runs."""
        ...

    def send(self, name: str) -> None:
        """Send the signal of this name."""
        ...

    def close(self) -> None:
        """Kill it."""
        ...


Start = Callable[[Callable[[], bool]], Sequence[Node]]
"""Start the launcher of every node. It may wait for resources; no nodes if its argument returned True: a stop."""


def run_nodes(start: Start, *, restarts: int) -> Started:
    """Run a job to its end; restart it after a failure, but not after a signal or an invalid request."""
    attempt = 0
    signals: list[signal.Signals] = []
    with handling(lambda number, frame: signals.append(signal.Signals(number))):
        while True:
            nodes = start(lambda: bool(signals))
            if not nodes:
                return Started(code=EXIT_AT_ONCE, lines=("stopped before it was started.",), failed=True)
            try:
                ended = _wait(nodes, signals)
            finally:
                for node in nodes:
                    node.close()
            is_final = ended.code in (EXIT_DONE, EXIT_STOPPED, EXIT_USER_MUST_ACT) or bool(signals)
            if is_final or attempt >= restarts:
                return ended
            attempt += 1
            print(*ended.lines, sep="\n", flush=True)
            time.sleep(SETTLE_S)
            print(
                f"restarting all nodes from the last checkpoint ({attempt} of {restarts} times)",
                flush=True,
            )


def _wait(nodes: Sequence[Node], signals: Sequence[signal.Signals]) -> Started:
    """Wait for all nodes and forward signals. After a failure the others get `PATIENCE_S`, then SIGTERM, then SIGKILL."""
    codes: dict[int, int] = {}
    failures: list[int] = []
    num_sent, ending_at, asked_to_end = 0, math.inf, False
    while len(codes) < len(nodes):
        ended = {place: node.poll() for place, node in enumerate(nodes) if place not in codes}
        codes |= {place: code for place, code in ended.items() if code is not None}
        new = [p for p, code in ended.items() if code not in (None, EXIT_DONE, EXIT_STOPPED)]
        failures += sorted(new, key=lambda place: codes[place] == EXIT_PEER_LOST)
        running = [node for place, node in enumerate(nodes) if place not in codes]
        for number in signals[num_sent:]:
            num_sent += 1
            for node in running:
                node.send(number.name)
        if ending_at == math.inf and (failures or _stopped_twice(signals)):
            ending_at = time.monotonic() + PATIENCE_S
        late_s = time.monotonic() - ending_at
        if late_s > (0.0 if _stopped_twice(signals) else GRACE_S):
            for node in running:
                node.close()
        elif late_s > 0 and not asked_to_end:
            asked_to_end = True
            for node in running:
                node.send("SIGTERM")
        if running:
            time.sleep(POLL_S)
    return _describe(nodes, codes, failures, signals)


def _stopped_twice(signals: Sequence[signal.Signals]) -> bool:
    return signals.count(signal.SIGINT) > 1


def _describe(
    nodes: Sequence[Node],
    codes: Mapping[int, int],
    failures: Sequence[int],
    signals: Sequence[signal.Signals],
) -> Started:
    if not failures:
        return Started(code=max(codes.values()))
    if _stopped_twice(signals):
        return Started(code=EXIT_AT_ONCE, lines=("stopped at once.",), failed=True)
    wrong = [place for place in failures if codes[place] == EXIT_USER_MUST_ACT]
    own = [place for place in failures if codes[place] != EXIT_PEER_LOST]
    place = (wrong or own or list(failures))[0]
    host, code = nodes[place].host, codes[place]
    how = "was lost" if code == LOST else f"exited with code {code}"
    lines = [f"node {place} of {len(nodes)} (counted from 0), {host}, {how}; the others were stopped."]
    lines += [f"  {host} | {line}" for line in nodes[place].lines]
    return Started(code=EXIT_PEER_LOST if code == LOST else code, lines=tuple(lines), failed=True)
