"""Agree with the launchers of the other machines on the start and the end of each attempt; or decide alone."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from crosstune.core.errors import EXIT_OUR_FAULT, UserError
from crosstune.core.version import __version__
from crosstune.distributed.channel import LONGEST_LINE, Channel, Message
from crosstune.distributed.environment import Nodes
from crosstune.distributed.free_ports import free_ports
from crosstune.distributed.master import check_master, explain_refusal
from crosstune.distributed.reports import PORT_ATTEMPTS, Outcome, Report, judge

_RETRY_S = 0.2
REPORT_LIMIT = LONGEST_LINE // 2
"""Bytes of a report, which is one message."""


@dataclass(frozen=True, kw_only=True)
class Begin:
    """The place of this machine's ranks in an attempt."""

    attempt: int
    first_rank: int
    size: int
    num_local: int
    master_addr: str
    port: int


@dataclass(frozen=True, kw_only=True)
class AttemptDecision:
    """The decision of all launchers after an attempt: start again, or end with an outcome."""

    outcome: Outcome
    restarts: int = 0
    """The number of restarts after a failure."""
    again: bool = False


class Link(Protocol):
    def begin(self, stopped: Callable[[], bool]) -> Begin | Outcome | None:
        """Wait until all machines are ready for an attempt; return how the run ended if they are not, and None if the
        user has stopped it meanwhile."""
        ...

    def should_stop(self, *, failed: bool) -> bool:
        """Return whether another machine has failed; `failed` tells that this one has."""
        ...

    def settle(self, report: Report) -> AttemptDecision:
        """Return what follows, once the processes of every machine have ended."""
        ...


class OneMachine:
    """Decide alone."""

    def __init__(self, *, size: int, max_restarts: int, port: int | None = None) -> None:
        self._size, self._max_restarts, self._port = size, max_restarts, port
        self._attempt = self._restarts = self._taken = 0

    def begin(self, stopped: Callable[[], bool]) -> Begin | None:
        if stopped():
            return None
        return Begin(
            attempt=self._attempt,
            first_rank=0,
            size=self._size,
            num_local=self._size,
            master_addr="127.0.0.1",
            port=self._port if self._port is not None else free_ports(1)[0],
        )

    def should_stop(self, *, failed: bool) -> bool:
        return False

    def settle(self, report: Report) -> AttemptDecision:
        verdict = judge([report], size=self._size, restarts_left=self._max_restarts - self._restarts)
        self._taken += verdict.other_port
        self._restarts += verdict.again
        self._attempt += 1
        again = verdict.again or (verdict.other_port and self._port is None and self._taken < PORT_ATTEMPTS)
        return AttemptDecision(outcome=verdict.outcome, restarts=self._restarts, again=again)


class SeveralMachines:
    """Do as the hub in the first machine's launcher says."""

    def __init__(self, nodes: Nodes, *, num_local: int, connect_s: float, lost_s: float) -> None:
        self._nodes, self._num_local, self._lost_s = nodes, num_local, lost_s
        check_master(nodes.master_addr, node_rank=nodes.node_rank)
        self._channel = self._connect(connect_s)
        self._channel.send(
            {
                "node": nodes.node_rank,
                "nodes": nodes.num_nodes,
                "num_local": num_local,
                "host": socket.gethostname(),
                "version": __version__,
            }
        )
        self._attempt = 0
        self._told = False
        self._stop = False

    def begin(self, stopped: Callable[[], bool]) -> Begin | Outcome | None:
        self._told = self._stop = False
        message = self._await("go", "end", stopped=stopped)
        if message is None:
            return None if stopped() else self._lost()
        if "end" in message:
            return _ending(message)
        self._attempt = message["go"]
        return Begin(
            attempt=message["go"],
            first_rank=message["first_rank"],
            size=message["size"],
            num_local=self._num_local,
            master_addr=self._nodes.master_addr,
            port=message["port"],
        )

    def should_stop(self, *, failed: bool) -> bool:
        if failed and not self._told:
            self._channel.send({"failed": self._attempt})
            self._told = True
        if not self._stop and self._channel.silent_s() > self._lost_s:
            self._stop = True
        while not self._stop:
            try:
                message = self._channel.inbox.get_nowait()
            except queue.Empty:
                break
            self._stop = message.get("stop") == self._attempt or "end" in message
            if "end" in message:
                self._channel.inbox.put(message)  # `settle` reads it
        return self._stop

    def settle(self, report: Report) -> AttemptDecision:
        self._channel.send({"report": report.to_json(limit=REPORT_LIMIT), "attempt": self._attempt})
        message = self._await("again", "end")
        if message is None:
            return AttemptDecision(outcome=self._lost())
        return AttemptDecision(
            outcome=_ending(message), restarts=message.get("again", 0), again="again" in message
        )

    def _connect(self, connect_s: float) -> Channel:
        place, deadline = (self._nodes.master_addr, self._nodes.master_port), time.monotonic() + connect_s
        while True:
            try:
                found = socket.create_connection(place, timeout=max(0.1, deadline - time.monotonic()))
                if found.getpeername() != found.getsockname():
                    return Channel(found)
                found.close()  # a port of our own, taken by chance before the hub listens
            except OSError as error:
                if time.monotonic() + _RETRY_S > deadline:
                    more = explain_refusal(place[0]) if self._nodes.node_rank else ""
                    raise UserError(
                        f"The first machine cannot be reached at {place[0]}:{place[1]}.",
                        why=f"nothing answered within {connect_s:g} s ({error}){more}.",
                        do="set MASTER_ADDR and MASTER_PORT to the address of the machine with NODE_RANK 0, start the command "
                        "there too, and let the port through the firewall",
                    ) from error
            time.sleep(_RETRY_S)

    def _await(self, *kinds: str, stopped: Callable[[], bool] = lambda: False) -> Message | None:
        """Return the next message of these kinds; None when the first machine is lost, or the user has stopped us."""
        while self._channel.silent_s() <= self._lost_s and not stopped():
            try:
                message = self._channel.inbox.get(timeout=_RETRY_S)
            except queue.Empty:
                continue
            if any(kind in message for kind in kinds):
                return message
        return None

    def _lost(self) -> Outcome:
        place = f"{self._nodes.master_addr}:{self._nodes.master_port}"
        return Outcome(
            code=EXIT_OUR_FAULT,
            lines=(
                f"the connection to the first machine at {place} was lost, so the processes here were ended.",
                f"  why: it was not heard for {self._lost_s:g} s: it is down, its launcher was killed, or the network is cut.",
                "  do:  run the same command with --resume auto on every machine to continue from the newest checkpoint",
            ),
        )


def _ending(message: Message) -> Outcome:
    lines: Sequence[str] = message.get("lines") or ()
    return Outcome(code=int(message.get("end", EXIT_OUR_FAULT)), lines=tuple(str(line) for line in lines))
