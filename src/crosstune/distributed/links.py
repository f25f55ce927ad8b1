"""Begin and end the attempts of a launcher, on one node or together with others through the coordinator."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from crosstune.core import __version__
from crosstune.core.errors import EXIT_OUR_FAULT, UserError
from crosstune.distributed.attempts import Outcome, Report, RestartPolicy, lost
from crosstune.distributed.environment import Nodes
from crosstune.distributed.master import check_master, free_ports, reach
from crosstune.files.json_files import parse_json
from crosstune.process.this_process import ActiveClock

BEAT_S = 1.0
"""Seconds between two heartbeats."""
LONGEST_LINE = 2**20
"""Maximum bytes of a message; the receiver closes the connection at a longer one."""
_WAIT_S = 0.2

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class AttemptLayout:
    """The place of this node's ranks in an attempt."""

    attempt: int
    size: int
    num_local: int
    port: int
    first_rank: int = 0
    master_addr: str = "127.0.0.1"
    node_rank: int = 0
    num_nodes: int = 1


class SingleNode:
    """The attempts of a single-node run, decided locally."""

    def __init__(self, *, size: int, max_restarts: int, port: int | None = None) -> None:
        self._port = port
        self._policy = RestartPolicy(size=size, max_restarts=max_restarts, port_is_fixed=port is not None)

    def begin(self, stopped: Callable[[], bool]) -> AttemptLayout | None:
        """Return the next attempt; None if the user stopped the run."""
        if stopped():
            return None
        size, port = self._policy.size, self._port if self._port is not None else free_ports(1)[0]
        return AttemptLayout(attempt=self._policy.attempt, size=size, num_local=size, port=port)

    def should_stop(self, failed: bool) -> bool:
        return False

    def decide(self, report: Report) -> Outcome:
        return self._policy.decide([report])


class MultiNode:
    """The attempts of a multi-node run, decided by the coordinator on node 0."""

    def __init__(self, nodes: Nodes, *, num_local: int, connect_s: float, lost_s: float) -> None:
        self._nodes, self._num_local, self._lost_s = nodes, num_local, lost_s
        self._place = f"{nodes.master_addr}:{nodes.master_port}"
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
        self._told = self._stop = False

    def begin(self, stopped: Callable[[], bool]) -> AttemptLayout | Outcome | None:
        """Wait until all nodes are ready; return an outcome if the run ends instead, None if the user stopped it."""
        self._told = self._stop = False
        message = self._await("go", "end", stopped=stopped)
        if message is None:
            return None if stopped() else self._lost()
        if "end" in message:
            return _outcome(message)
        self._attempt = message["go"]
        return AttemptLayout(
            attempt=message["go"],
            first_rank=message["first_rank"],
            size=message["size"],
            num_local=self._num_local,
            master_addr=self._nodes.master_addr,
            port=message["port"],
            node_rank=self._nodes.node_rank,
            num_nodes=self._nodes.num_nodes,
        )

    def should_stop(self, failed: bool) -> bool:
        """Return True if another node has failed; tell the coordinator if a local rank has."""
        if failed and not self._told:
            self._channel.send({"failed": self._attempt})
            self._told = True
        self._stop = self._stop or self._channel.silent_s() > self._lost_s
        while not self._stop and not self._channel.inbox.empty():
            message = self._channel.inbox.get()
            self._stop = message.get("stop") == self._attempt or "end" in message
            if "end" in message:
                self._channel.inbox.put(message)  # for `decide`
        return self._stop

    def decide(self, report: Report) -> Outcome:
        """Return the coordinator's decision after the ranks of all nodes have exited."""
        self._channel.send({"report": dataclasses.asdict(report)})
        message = self._await("again", "end")
        return self._lost() if message is None else _outcome(message)

    def _connect(self, connect_s: float) -> Channel:
        address, port = self._nodes.master_addr, self._nodes.master_port
        try:
            return Channel(reach(address, port, limit_s=connect_s, node_rank=self._nodes.node_rank))
        except OSError as error:
            raise UserError(
                f"Node 0 cannot be reached at {self._place}.",
                why=str(error),
                do="set MASTER_ADDR and MASTER_PORT to the address of the node with NODE_RANK 0, start the command "
                "there too, and let the port through the firewall",
            ) from error

    def _await(self, *kinds: str, stopped: Callable[[], bool] = lambda: False) -> Message | None:
        """Return the next message of these kinds; None when node 0 is lost or the user stopped the run."""
        while self._channel.silent_s() <= self._lost_s and not stopped():
            try:
                message = self._channel.inbox.get(timeout=_WAIT_S)
            except queue.Empty:
                continue
            if any(kind in message for kind in kinds):
                return message
        return None

    def _lost(self) -> Outcome:
        return lost(f"node 0 at {self._place}", f"it was silent for {self._lost_s:g} s")


def _outcome(message: Message) -> Outcome:
    lines = tuple(str(line) for line in message.get("lines") or ())
    code, restarts = int(message.get("end", EXIT_OUR_FAULT)), message.get("again", 0)
    return Outcome(code=code, lines=lines, again="again" in message, restarts=restarts)


class Channel:
    """A connection to another launcher. `inbox` contains its messages; heartbeats only show that it is alive."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._sending = threading.Lock()
        self.inbox: queue.Queue[Message] = queue.Queue()
        self.closed = False
        self._clock = ActiveClock()  # nodes suspended together have not lost each other
        self._heard = self._clock.now()
        for act in (self._receive, self._beat):
            threading.Thread(target=act, daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message. A lost connection does not raise; see `silent_s`."""
        line = json.dumps(message).encode() + b"\n"
        assert len(line) <= LONGEST_LINE, f"a message of {len(line):,} bytes"
        with self._sending:
            try:
                self._socket.sendall(line)
            except OSError:
                self.closed = True

    def silent_s(self) -> float:
        """Return the seconds since the last message or heartbeat; infinity once the other side has closed."""
        if self.closed and self.inbox.empty():
            return float("inf")
        return self._clock.now() - self._heard

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive(self) -> None:
        """Read lines until the other side closes or sends anything else."""
        try:
            with contextlib.suppress(OSError, ValueError), self._socket.makefile("rb") as lines:
                while (line := lines.readline(LONGEST_LINE)).endswith(b"\n"):
                    self._heard = self._clock.now()
                    message = parse_json(line)
                    if isinstance(message, dict) and message:
                        self.inbox.put(message)
        finally:
            self.closed = True

    def _beat(self) -> None:
        while not self.closed:
            self.send({})
            self._clock.now()
            time.sleep(BEAT_S)
