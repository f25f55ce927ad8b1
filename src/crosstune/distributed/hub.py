"""Keep the launchers of several machines in step: all start an attempt together, and all end it together.

The hub runs in a thread of the first machine's launcher; every launcher, the first one too, connects to it.
"""

from __future__ import annotations

import errno
import queue
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from crosstune.core.errors import EXIT_OUR_FAULT, EXIT_USER_MUST_ACT, PortTaken, UserError, readable
from crosstune.core.version import __version__
from crosstune.distributed.channel import Channel, Message
from crosstune.distributed.environment import Nodes
from crosstune.distributed.free_ports import free_ports
from crosstune.distributed.master import listen
from crosstune.distributed.reports import PORT_ATTEMPTS, Outcome, Report, Verdict, judge
from crosstune.distributed.variables import MOST_PROCESSES

POLL_S = 0.05
_HANG_UP_S = 2.0
RESOLVE_S = 1.0
"""Time between two looks for the name of the first machine."""


@dataclass
class Member:
    """The launcher of one machine."""

    node: int
    host: str
    num_local: int
    channel: Channel
    first_rank: int = 0
    report: Report | None = None

    @property
    def name(self) -> str:
        return f"machine {self.node} (host {self.host})"


@dataclass(kw_only=True)
class Coordinator:
    """The first machine's side of the launchers' conversation."""

    nodes: Nodes
    max_restarts: int
    connect_s: float
    lost_s: float
    _members: dict[int, Member] = field(default_factory=dict)
    _arrived: queue.Queue[tuple[Channel, Message]] = field(default_factory=queue.Queue)

    def start(self) -> None:
        """Listen at the master's address, and coordinate in a thread."""
        place = (self.nodes.master_addr, self.nodes.master_port)
        try:
            self._listening = self._listen(place)
        except OSError as error:
            where = f"{place[0]}:{place[1]}"
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(
                    f"The launcher cannot listen on {where}.",
                    why="another program has this port.",
                    do="choose another --master_port (MASTER_PORT) on every machine",
                ) from error
            raise UserError(
                f"The launcher cannot listen on {where}.",
                why=f"{error}.",
                do="set MASTER_ADDR to an address of the machine with NODE_RANK 0, or NODE_RANK to another number here",
            ) from error
        for act in (self._accept, self._coordinate):
            threading.Thread(target=act, daemon=True).start()

    def _listen(self, place: tuple[str, int]) -> socket.socket:
        """Listen at an address. The name of a Kubernetes pod resolves only some seconds after the pod has started."""
        deadline = time.monotonic() + self.connect_s
        while True:
            try:
                return listen(*place, several=self.nodes.num_nodes > 1, backlog=self.nodes.num_nodes + 16)
            except socket.gaierror:
                if time.monotonic() > deadline:
                    raise
            time.sleep(RESOLVE_S)

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(Channel(connected),), daemon=True).start()

    def _greet(self, channel: Channel) -> None:
        try:
            self._arrived.put((channel, channel.inbox.get(timeout=self.connect_s)))
        except queue.Empty:
            channel.close()

    def _coordinate(self) -> None:
        """Lead the run to its end. A bug here must end it too: the launchers would wait for us forever."""
        outcome = Outcome(
            code=EXIT_OUR_FAULT, lines=("the launcher of the first machine failed; its output says how.",)
        )
        try:
            outcome = self._lead()
        finally:
            self._finish({"end": outcome.code, "lines": list(outcome.lines)})

    def _lead(self) -> Outcome:
        """Run attempts until one succeeds, or no other may help; return how the run ended."""
        outcome = self._join()
        attempt = restarts = taken = 0
        while outcome is None:
            self._begin(attempt)
            outcome = self._run(attempt)
            if outcome is not None:
                break
            verdict = self._judge(self.max_restarts - restarts)
            taken += verdict.other_port
            if not verdict.again and not (verdict.other_port and taken < PORT_ATTEMPTS):
                return verdict.outcome
            restarts += verdict.again
            attempt += 1
            self._tell({"again": restarts, "lines": list(verdict.outcome.lines)})
        return outcome

    def _finish(self, message: Message) -> None:
        """Tell the other machines first and let them hang up: the process of this one ends when it hears it."""
        while 0 not in self._members:  # our own launcher connects right after us
            channel, hello = self._arrived.get()
            if hello.get("node") == 0:
                self._members[0] = Member(node=0, host="", num_local=1, channel=channel)
        others = [member for member in self._members.values() if member.node != 0]
        for member in others:
            member.channel.send(message)
        deadline = time.monotonic() + _HANG_UP_S
        while not all(member.channel.closed for member in others) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._members[0].channel.send(message)

    def _join(self) -> Outcome | None:
        """Wait for the launcher of every machine; return the reason to end if one does not come or does not fit."""
        deadline = time.monotonic() + self.connect_s
        while missing := [node for node in range(self.nodes.num_nodes) if node not in self._members]:
            try:
                channel, hello = self._arrived.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                numbers = ", ".join(str(node) for node in missing[:8])
                return _refused(
                    f"Of the {self.nodes.num_nodes} machines, NODE_RANK {numbers} did not come within {self.connect_s:g} s.",
                    do="start the command on every machine, with the same NNODES, MASTER_ADDR and MASTER_PORT",
                )
            problem = self._take(channel, hello)
            if problem is not None:
                return problem
        first = 0
        for _, member in sorted(self._members.items()):
            member.first_rank, first = first, first + member.num_local
        self._size = first
        return None

    def _take(self, channel: Channel, hello: Message) -> Outcome | None:
        node, host = hello.get("node"), readable(str(hello.get("host")))
        num_local, version = hello.get("num_local"), hello.get("version")
        if type(node) is not int or type(num_local) is not int or not 1 <= num_local <= MOST_PROCESSES:
            channel.close()  # not a launcher of ours
            return None
        member = Member(node=node, host=host, num_local=num_local, channel=channel)
        if version != __version__:
            return self._refuse(
                member,
                f"{member.name} has crosstune {version}, the first machine has {__version__}.",
                do="install the same version on every machine",
            )
        if hello.get("nodes") != self.nodes.num_nodes or not 0 <= node < self.nodes.num_nodes:
            return self._refuse(
                member,
                f"{member.name} has NNODES {hello.get('nodes')}, the first machine has {self.nodes.num_nodes}.",
                do="set the same NNODES on every machine",
            )
        if node in self._members:
            return self._refuse(
                member,
                f"{self._members[node].host} and {host} both have NODE_RANK {node}.",
                do="set NODE_RANK to 0, 1, ... on the machines",
            )
        self._members[node] = member
        return None

    def _refuse(self, member: Member, problem: str, *, do: str) -> Outcome:
        outcome = _refused(problem, do=do)
        member.channel.send({"end": outcome.code, "lines": list(outcome.lines)})
        return outcome

    def _begin(self, attempt: int) -> None:
        [port] = free_ports(1, address=self.nodes.master_addr)
        for member in self._members.values():
            member.report = None
            member.channel.send(
                {"go": attempt, "first_rank": member.first_rank, "size": self._size, "port": port}
            )

    def _run(self, attempt: int) -> Outcome | None:
        """Wait for the reports of all machines; return how the run ended if one is lost. A failure on one machine stops
        all."""
        stopped = False
        self._order: list[Member] = []
        while any(member.report is None for member in self._members.values()):
            for member in self._members.values():
                while not member.channel.inbox.empty():
                    message = member.channel.inbox.get()
                    try:
                        has_failed = self._read(member, message, attempt)
                    except ValueError as error:
                        return _lost(member, f"it sent a report that cannot be read: {error}.")
                    if has_failed and member not in self._order:
                        self._order.append(member)
                if member.report is None and member.channel.silent_s() > self.lost_s:
                    return _lost(
                        member,
                        f"it was not heard for {self.lost_s:g} s: it is down, its launcher was killed, or the network is cut.",
                    )
            if self._order and not stopped:
                self._tell({"stop": attempt})
                stopped = True
            time.sleep(POLL_S)
        return None

    def _read(self, member: Member, message: Message, attempt: int) -> bool:
        """Keep the report in a message; return whether it tells of a failure. Raises ValueError for no report."""
        if "report" in message:
            member.report = Report.from_json(message["report"])
            if missing := set(range(member.first_rank, member.first_rank + member.num_local)) - set(
                member.report.codes
            ):
                raise ValueError(f"rank {min(missing)} is not in it")
            return bool(member.report.failures)
        return message.get("failed") == attempt

    def _judge(self, restarts_left: int) -> Verdict:
        ordered = [*self._order, *(m for m in self._members.values() if m not in self._order)]
        reports = [member.report for member in ordered if member.report is not None]
        return judge(reports, size=self._size, restarts_left=restarts_left)

    def _tell(self, message: Message) -> None:
        for member in self._members.values():
            member.channel.send(message)


def _lost(member: Member, why: str) -> Outcome:
    return Outcome(
        code=EXIT_OUR_FAULT,
        lines=(
            f"the connection to {member.name} was lost, so the run was ended.",
            f"  why: {why}",
            "  do:  run the same command with --resume auto on every machine to continue from the newest checkpoint",
        ),
    )


def _refused(problem: str, *, do: str) -> Outcome:
    lines: Sequence[str] = UserError(problem, do=do).lines()
    return Outcome(code=EXIT_USER_MUST_ACT, lines=tuple(lines))
