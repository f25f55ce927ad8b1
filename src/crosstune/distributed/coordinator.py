"""Start and end each attempt on all nodes together.

The coordinator runs in a thread of node 0's launcher; every launcher, including that one, connects to it.
"""

from __future__ import annotations

import errno
import queue
import socket
import threading
import time
from dataclasses import dataclass, field

from crosstune.core import __version__
from crosstune.core.errors import EXIT_OUR_FAULT, EXIT_USER_MUST_ACT, PortTaken, UserError, readable
from crosstune.distributed.attempts import Outcome, Report, RestartPolicy, lost
from crosstune.distributed.environment import MAX_PROCESSES, Nodes
from crosstune.distributed.links import Channel, Message
from crosstune.distributed.master import free_ports, listen

_POLL_S = 0.05
_HANG_UP_S = 2.0
_RESOLVE_S = 0.5
"""Time between two lookups of node 0's name."""


@dataclass
class Member:
    """The launcher of one node."""

    node: int
    host: str
    num_local: int
    channel: Channel
    first_rank: int = 0

    @property
    def name(self) -> str:
        return f"node {self.node} (host {self.host})"


class _RunEnded(Exception):
    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


@dataclass(kw_only=True)
class Coordinator:
    """The server side of the launchers' protocol; `links.MultiNode` is the client."""

    nodes: Nodes
    max_restarts: int
    connect_s: float
    lost_s: float
    _members: dict[int, Member] = field(default_factory=dict)
    _arrived: queue.Queue[tuple[Channel, Message]] = field(default_factory=queue.Queue)

    def start(self) -> None:
        """Listen at the master address, and coordinate in a thread."""
        where = f"{self.nodes.master_addr}:{self.nodes.master_port}"
        try:
            listening = self._listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(
                    f"The launcher cannot listen on {where}.",
                    why="another program is using this port.",
                    do="choose a different --master_port (MASTER_PORT) on every node",
                ) from error
            raise UserError(
                f"The launcher cannot listen on {where}.",
                why=f"{error}.",
                do="set MASTER_ADDR to an address of the node with NODE_RANK 0, or use a different NODE_RANK on this node",
            ) from error
        threading.Thread(target=self._accept, args=(listening,), daemon=True).start()
        threading.Thread(target=self._coordinate, daemon=True).start()

    def _listen(self) -> socket.socket:
        """Listen; wait until the name resolves: a new Kubernetes pod needs some seconds."""
        nodes, deadline = self.nodes, time.monotonic() + self.connect_s
        while True:
            try:
                return listen(nodes.master_addr, nodes.master_port, several=nodes.num_nodes > 1)
            except socket.gaierror:
                if time.monotonic() > deadline:
                    raise
            time.sleep(min(_RESOLVE_S, self.connect_s))

    def _accept(self, listening: socket.socket) -> None:
        while True:
            connected, _ = listening.accept()
            threading.Thread(target=self._greet, args=(Channel(connected),), daemon=True).start()

    def _greet(self, channel: Channel) -> None:
        try:
            self._arrived.put((channel, channel.inbox.get(timeout=self.connect_s)))
        except queue.Empty:
            channel.close()

    def _coordinate(self) -> None:
        """Run all attempts. A bug must end the run too: the launchers would wait forever."""
        outcome = Outcome(
            code=EXIT_OUR_FAULT, lines=("the launcher of node 0 failed; its output has the reason.",)
        )
        try:
            policy = RestartPolicy(size=self._join(), max_restarts=self.max_restarts)
            while (ended := policy.decide(self._run(policy.attempt, size=policy.size))).again:
                self._tell({"again": ended.restarts, "lines": list(ended.lines)})
            outcome = ended
        except _RunEnded as error:
            outcome = error.outcome
        finally:
            self._finish(outcome)

    def _finish(self, outcome: Outcome) -> None:
        """Tell the other nodes first and let them disconnect: this process exits once its own launcher is told."""
        message = {"end": outcome.code, "lines": list(outcome.lines)}
        while 0 not in self._members:  # our own launcher connects right after us
            channel, hello = self._arrived.get()
            if hello.get("node") == 0:
                self._members[0] = Member(node=0, host="", num_local=1, channel=channel)
        others = [member for member in self._members.values() if member.node != 0]
        for member in others:
            member.channel.send(message)
        deadline = time.monotonic() + _HANG_UP_S
        while not all(member.channel.closed for member in others) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._members[0].channel.send(message)

    def _join(self) -> int:
        """Wait for the launcher of every node, number the ranks, and return their number."""
        deadline = time.monotonic() + self.connect_s
        while missing := [node for node in range(self.nodes.num_nodes) if node not in self._members]:
            try:
                self._admit(*self._arrived.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                numbers = ", ".join(str(node) for node in missing[:8])
                problem = f"NODE_RANK {numbers} did not connect within {self.connect_s:g} s."
                do = "start the command on every node, with the same NNODES, MASTER_ADDR and MASTER_PORT"
                raise _RunEnded(_refusal(problem, do=do)) from None
        size = 0
        for _, member in sorted(self._members.items()):
            member.first_rank, size = size, size + member.num_local
        return size

    def _admit(self, channel: Channel, hello: Message) -> None:
        """Add a launcher; end the run if its version, NNODES or NODE_RANK does not match."""
        node, host, num_local = hello.get("node"), readable(str(hello.get("host"))), hello.get("num_local")
        if type(node) is not int or type(num_local) is not int or not 1 <= num_local <= MAX_PROCESSES:
            channel.close()  # not a launcher of crosstune
            return
        member = Member(node=node, host=host, num_local=num_local, channel=channel)
        if hello.get("version") != __version__:
            problem = f"{member.name} has crosstune {hello.get('version')}, node 0 has {__version__}."
        elif hello.get("nodes") != self.nodes.num_nodes or not 0 <= node < self.nodes.num_nodes:
            problem = f"{member.name} has NNODES {hello.get('nodes')}, node 0 has {self.nodes.num_nodes}."
        elif node in self._members:
            problem = f"{self._members[node].host} and {host} both have NODE_RANK {node}."
        else:
            self._members[node] = member
            return
        refusal = _refusal(problem, do="set the same NNODES and NODE_RANK 0, 1, ... with the same crosstune")
        channel.send({"end": refusal.code, "lines": list(refusal.lines)})
        raise _RunEnded(refusal)

    def _run(self, attempt: int, *, size: int) -> list[Report]:
        """Run one attempt; return the reports in order of failure. A failure on one node stops all."""
        [port] = free_ports(1, address=self.nodes.master_addr)
        for member in self._members.values():
            member.channel.send({"go": attempt, "first_rank": member.first_rank, "size": size, "port": port})
        reports: dict[int, Report] = {}
        failed: list[int] = []
        while len(reports) < len(self._members):
            for node, member in self._members.items():
                while not member.channel.inbox.empty():
                    message = member.channel.inbox.get()
                    if "report" in message:
                        reports[node] = Report.from_json(message["report"])
                    has_failed = message.get("failed") == attempt or (
                        node in reports and reports[node].failures
                    )
                    if has_failed and node not in failed:
                        failed.append(node)
                        if len(failed) == 1:
                            self._tell({"stop": attempt})
                if node not in reports and member.channel.silent_s() > self.lost_s:
                    raise _RunEnded(lost(member.name, f"it was silent for {self.lost_s:g} s"))
            time.sleep(_POLL_S)
        return [reports[node] for node in (*failed, *(node for node in reports if node not in failed))]

    def _tell(self, message: Message) -> None:
        for member in self._members.values():
            member.channel.send(message)


def _refusal(problem: str, *, do: str) -> Outcome:
    return Outcome(code=EXIT_USER_MUST_ACT, lines=tuple(UserError(problem, do=do).lines()))
