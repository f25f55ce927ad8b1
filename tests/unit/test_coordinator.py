"""The launchers of several nodes, as processes on loopback with small programs as ranks."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forks import LIMIT_S, Forked, fork

from crosstune.core import __version__
from crosstune.core.errors import UserError
from crosstune.distributed import launch as launching
from crosstune.distributed.attempts import Report
from crosstune.distributed.coordinator import Coordinator
from crosstune.distributed.environment import Nodes
from crosstune.distributed.launch import launch, torch_environments
from crosstune.distributed.links import LONGEST_LINE, Channel
from crosstune.distributed.master import free_ports

START = "import os, signal, sys, time, pathlib; rank = int(os.environ['RANK']); folder = pathlib.Path(sys.argv[1])\n"


def start(node: int, code: str, folder: Path, port: int, **more: Any) -> Forked:
    nodes = Nodes(
        **{"num_nodes": 2, "node_rank": node, "master_addr": "127.0.0.1", "master_port": port}
        | more.pop("nodes", {})
    )
    limits: dict[str, Any] = {"max_restarts": 0, "connect_s": LIMIT_S, "collective_s": LIMIT_S}
    command = [sys.executable, "-S", "-c", START + code, str(folder)]
    run = functools.partial(_launch, command, nodes, **{"num_local": 1, **limits, **more})
    return fork(run, said=folder.with_name(f"{folder.name}-{node}.said"))


def _launch(command: list[str], nodes: Nodes, **options: Any) -> int:
    launching.PATIENCE_S = 0.5
    say = functools.partial(print, "said:")
    try:
        outcome = launch(command, nodes=nodes, environments=torch_environments, say=say, **options)
    except UserError as error:
        print(*error.lines(), sep="\n")
        return error.exit_code
    print(*outcome.lines, sep="\n")
    return outcome.code


def test_ranks_are_counted_over_the_machines_and_end_together(tmp_path: Path) -> None:
    code = "names = ('WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'MASTER_PORT')\n"
    code += "(folder / str(rank)).write_text(' '.join(os.environ[name] for name in names)); sys.exit(3)"
    [port] = free_ports(1)
    nodes = [start(node, code, tmp_path, port, num_local=node + 1) for node in (0, 1)]
    assert [node.end()[0] for node in nodes] == [3, 3]
    found = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [row[:4] for row in found] == [["3", "0", "1", "0"], ["3", "0", "2", "1"], ["3", "1", "2", "1"]]
    assert len({row[4] for row in found}) == 1 and found[0][4] != str(port)


def test_all_machines_restart_after_a_kill_on_one(tmp_path: Path) -> None:
    code = """
attempt = os.environ["CROSSTUNE_ATTEMPT"]
(folder / f"{rank}-{attempt}").touch()
while attempt == "0":
    if rank == 1 and (folder / "0-0").exists(): os.kill(os.getpid(), 9)
    time.sleep(0.02)
"""
    [port] = free_ports(1)
    nodes = [start(node, code, tmp_path, port, max_restarts=1) for node in (0, 1)]
    for code_and_text in [node.end() for node in nodes]:
        assert code_and_text[0] == 0, code_and_text
        assert "process 1 of 2" in code_and_text[1] and "(restart 1 of 1)" in code_and_text[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "0-1", "1-0", "1-1"]


@pytest.mark.slow
def test_a_machine_that_is_gone_ends_the_run(tmp_path: Path) -> None:
    code = "(folder / str(rank)).touch(); time.sleep(3600)"
    [port] = free_ports(1)
    first, second = (start(node, code, tmp_path, port, collective_s=3.0) for node in (0, 1))
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.02)
        assert first.process.is_alive() and second.process.is_alive()
    os.kill(second.pid, signal.SIGSTOP)
    code_first, said = first.end()
    assert code_first == 1 and "the connection to node 1" in said
    os.kill(second.pid, signal.SIGCONT)
    code_second, said = second.end()
    assert code_second == 1 and "was lost" in said  # told by the coordinator, or noticed by itself


def test_a_machine_that_does_not_come_is_named(tmp_path: Path) -> None:
    [port] = free_ports(1)
    code, said = start(0, "pass", tmp_path, port, connect_s=1.0).end()
    assert code == 2 and "NODE_RANK 1 did not connect within 1 s" in said


def test_machines_with_different_nnodes_are_refused(tmp_path: Path) -> None:
    [port] = free_ports(1)
    nodes = [start(0, "pass", tmp_path, port), start(1, "pass", tmp_path, port, nodes={"num_nodes": 3})]
    ends = [node.end() for node in nodes]
    assert [code for code, _ in ends] == [2, 2]
    assert all("has NNODES 3, node 0 has 2" in said for _, said in ends)


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        code, said = start(0, "pass", tmp_path, other.getsockname()[1]).end()
    assert code == 5 and "another program is using this port" in said


@pytest.mark.parametrize("num_failures", [2, 10**6])
def test_a_name_that_does_not_resolve_yet_is_waited_for(
    num_failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a Kubernetes pod resolves only after the pod has started."""
    tried, resolve, [port] = list[Any](), socket.getaddrinfo, free_ports(1)

    def resolve_later(name: str, *place: Any, **more: Any) -> Any:
        tried.append(name)
        if len(tried) <= num_failures:
            raise socket.gaierror("Name or service not known")
        return resolve("127.0.0.1", *place, **more)

    monkeypatch.setattr("socket.getaddrinfo", resolve_later)
    monkeypatch.setattr("crosstune.distributed.coordinator._RESOLVE_S", 0.01)
    nodes = Nodes(num_nodes=2, master_addr="run-0.run", master_port=port)
    comes = num_failures == 2
    listening = Coordinator(nodes=nodes, max_restarts=0, connect_s=LIMIT_S if comes else 0.2, lost_s=1.0)
    if comes:
        listening.start()
        assert len(tried) == 3
    else:
        with pytest.raises(UserError, match="cannot listen on run-0"):
            listening.start()


class Machine:
    """The launcher of a machine as the coordinator sees it, with messages of the test."""

    def __init__(self, place: tuple[str, int], node: int) -> None:
        self.channel = Channel(socket.create_connection(place))
        hello = {"node": node, "nodes": 2, "num_local": 1, "host": f"host-{node}", "version": __version__}
        self.channel.send(hello)

    def await_message(self, kind: str) -> dict[str, Any]:
        while kind not in (message := self.channel.inbox.get(timeout=LIMIT_S)):
            pass
        return message


def report(rank: int) -> dict[str, Any]:
    return dataclasses.asdict(Report(codes={rank: 0}))


@pytest.mark.parametrize("sent", [b"\xff not JSON", b"x" * (LONGEST_LINE + 10)], ids=["bytes", "long"])
def test_a_machine_that_sends_nonsense_ends_the_run(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of the coordinator's thread, for which all launchers would wait."""
    monkeypatch.setattr("crosstune.distributed.coordinator._HANG_UP_S", 0.1)
    place = ("127.0.0.1", free_ports(1)[0])
    nodes = Nodes(num_nodes=2, master_addr=place[0], master_port=place[1])
    Coordinator(nodes=nodes, max_restarts=3, connect_s=LIMIT_S, lost_s=LIMIT_S).start()
    first, second = Machine(place, 0), Machine(place, 1)
    for machine in (first, second):
        machine.await_message("go")
    first.channel.send({"report": report(0)})
    second.channel._socket.sendall(sent + b"\n")
    ended = first.await_message("end")
    assert ended["end"] == 1 and "node 1 (host host-1) was lost" in ended["lines"][0]
