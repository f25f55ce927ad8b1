"""Supervise the machines of a job: end all when one fails, pass signals on, start again from the last checkpoint."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

from crosstune.core.errors import (
    EXIT_AT_ONCE,
    EXIT_DONE,
    EXIT_PEER_LOST,
    EXIT_STOPPED,
    EXIT_USER_MUST_ACT,
)
from crosstune.core.signals import taken_signals
from crosstune.distributed.jobs.job import Started

PATIENCE_S = 5.0
"""Time for the other machines to end by themselves after one failed."""
GRACE_S = 60.0
"""Time between SIGTERM and the hard end."""
POLL_S = 0.2
SETTLE_S = 3.0
"""Wait before a new start: what is left of a lost machine ends meanwhile, and lets go of the run folder."""


LOST = 255
"""The exit code of a machine that cannot be reached any more, which is that of ssh."""


class Node(Protocol):
    """The launcher of one machine."""

    host: str

    def poll(self) -> int | None:
        """Return the exit code; None while it runs. A machine that is lost has the code LOST."""
        ...

    def send(self, name: str) -> None:
        """Send the signal of this name."""
        ...

    def close(self) -> None:
        """End it at once if it still runs, and let go of it."""
        ...

    def last_lines(self) -> list[str]:
        """Return the last output that was not shown."""
        ...


Start = Callable[[Callable[[], bool]], Sequence[Node]]
"""Start the launcher of every machine. It may wait for room, until its argument says that the user does not want to: then
it returns no machine."""


def run_nodes(start: Start, *, restarts: int, report: Callable[[str], None]) -> Started:
    """Run a job to its end. It is started again after a failure, but not after a signal or a wrong request."""
    attempt = 0
    with _Signals().taken() as signals:
        while True:
            nodes = start(lambda: bool(signals.received))
            if not nodes:
                return Started(code=EXIT_AT_ONCE, lines=("stopped before it was started.",), failed=True)
            try:
                codes, failures = _wait(nodes, signals)
                ended = _describe(nodes, codes, failures, signals)
            finally:
                for node in nodes:
                    node.close()
            is_final = ended.code in (EXIT_DONE, EXIT_STOPPED, EXIT_USER_MUST_ACT) or bool(signals.received)
            if is_final or attempt >= restarts:
                return ended
            attempt += 1
            for line in ended.lines:
                report(line)
            time.sleep(SETTLE_S)
            report(f"all machines are started again from the last checkpoint ({attempt} of {restarts} times)")


@dataclass
class _Signals:
    """The stop signals that were received, in order."""

    received: list[signal.Signals] = field(default_factory=list)

    @contextlib.contextmanager
    def taken(self) -> Iterator[_Signals]:
        def note(number: int, frame: FrameType | None) -> None:
            self.received.append(signal.Signals(number))

        previous = {number: signal.signal(number, note) for number in taken_signals()}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @property
    def again(self) -> bool:
        """True if the user asked twice."""
        return self.received.count(signal.SIGINT) > 1


def _wait(nodes: Sequence[Node], signals: _Signals) -> tuple[list[int], list[int]]:
    """Wait for all machines; return their exit codes, and those that failed, in the order in which we noticed."""
    codes: list[int | None] = [None] * len(nodes)
    failures: list[int] = []
    num_sent, ending_at, asked_to_end = 0, None, False
    while True:
        for place, node in enumerate(nodes):
            if codes[place] is None:
                codes[place] = node.poll()
        new = [
            p for p, c in enumerate(codes) if c not in (None, EXIT_DONE, EXIT_STOPPED) and p not in failures
        ]
        failures += sorted(new, key=lambda place: codes[place] == EXIT_PEER_LOST)
        running = [node for node, code in zip(nodes, codes, strict=True) if code is None]
        if not running:
            return [code for code in codes if code is not None], failures
        while num_sent < len(signals.received):
            for node in running:
                node.send(signals.received[num_sent].name)
            num_sent += 1
        if ending_at is None and (failures or signals.again):
            ending_at = time.monotonic() + PATIENCE_S
        late_s = time.monotonic() - ending_at if ending_at is not None else -1.0
        if late_s > (0.0 if signals.again else GRACE_S):
            for node in running:
                node.close()
        elif late_s > 0 and not asked_to_end:
            asked_to_end = True
            for node in running:
                node.send("SIGTERM")
        time.sleep(POLL_S)


def _describe(
    nodes: Sequence[Node], codes: Sequence[int], failures: Sequence[int], signals: _Signals
) -> Started:
    if not failures:
        return Started(code=max(codes))
    if signals.again:
        return Started(code=EXIT_AT_ONCE, lines=("stopped at once.",), failed=True)
    wrong = [place for place in failures if codes[place] == EXIT_USER_MUST_ACT]
    itself = [place for place in failures if codes[place] != EXIT_PEER_LOST]
    place = (wrong or itself or list(failures))[0]
    host, code = nodes[place].host, codes[place]
    how = "was lost" if code == LOST else f"ended with code {code}"
    lines = [f"machine {place} of {len(nodes)} (counted from 0), {host}, {how}; the others were stopped."]
    lines += [f"  {host} | {line}" for line in nodes[place].last_lines()]
    return Started(code=EXIT_PEER_LOST if code == LOST else code, lines=tuple(lines), failed=True)
