"""The launchers of several machines, as processes on loopback with small programs in the place of ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from crosstune.core.errors import UserError
from crosstune.distributed import hub
from crosstune.distributed.environment import Nodes
from crosstune.distributed.free_ports import free_ports

LAUNCHER = """
import functools, json, sys
from crosstune.distributed.environment import Nodes
from crosstune.distributed.launch import launch_node, torch_environments
from crosstune.core.errors import UserError
asked = json.loads(sys.argv[1])
nodes = Nodes(**asked["nodes"])
try:
    outcome = launch_node(
        [sys.executable, "-S", "-c", asked["code"], *asked["words"]], nodes, num_local=asked["num_local"],
        environments=functools.partial(torch_environments, nodes=nodes), max_restarts=asked["max_restarts"],
        connect_s=asked["connect_s"], collective_s=asked["collective_s"], say=lambda lines: print("said:", *lines, sep="\\n"),
    )
except UserError as error:
    print("\\n".join(error.lines())); sys.exit(error.exit_code)
print("\\n".join(outcome.lines)); sys.exit(outcome.code)
"""
START = "import os, signal, sys, time, pathlib; rank = int(os.environ['RANK']); folder = pathlib.Path(sys.argv[1])\n"


def start(node: int, code: str, folder: Path, port: int, **more: Any) -> subprocess.Popen[str]:
    nodes = {"num_nodes": 2, "node_rank": node, "master_addr": "127.0.0.1", "master_port": port}
    asked: dict[str, Any] = {"num_local": 1, "max_restarts": 0, "connect_s": 30.0, "collective_s": 30.0}
    asked |= {"nodes": nodes | more.pop("nodes", {}), "code": START + code, "words": [str(folder)], **more}
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, json.dumps(asked)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, said


def test_ranks_are_counted_over_the_machines_and_end_together(tmp_path: Path) -> None:
    code = "names = ('WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'MASTER_PORT')\n"
    code += "(folder / str(rank)).write_text(' '.join(os.environ[name] for name in names)); sys.exit(3)"
    [port] = free_ports(1)
    nodes = [start(node, code, tmp_path, port, num_local=node + 1) for node in (0, 1)]
    assert [end(node)[0] for node in nodes] == [3, 3]
    found = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [row[:4] for row in found] == [["3", "0", "1", "0"], ["3", "0", "2", "1"], ["3", "1", "2", "1"]]
    assert len({row[4] for row in found}) == 1 and found[0][4] != str(port)


def test_all_machines_restart_after_a_kill_on_one(tmp_path: Path) -> None:
    code = """
attempt = os.environ["CROSSTUNE_ATTEMPT"]
(folder / f"{rank}-{attempt}").touch()
if rank == 1 and attempt == "0": os.kill(os.getpid(), 9)
if attempt == "0": time.sleep(900)
"""
    [port] = free_ports(1)
    nodes = [start(node, code, tmp_path, port, max_restarts=1) for node in (0, 1)]
    for code_and_text in map(end, nodes):
        assert code_and_text[0] == 0, code_and_text
        assert "process 1 of 2" in code_and_text[1] and "(restart 1 of 1)" in code_and_text[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "0-1", "1-0", "1-1"]


def test_a_machine_that_is_gone_ends_the_run(tmp_path: Path) -> None:
    code = "(folder / str(rank)).touch(); time.sleep(900)"
    [port] = free_ports(1)
    first, second = (start(node, code, tmp_path, port, collective_s=3.0) for node in (0, 1))
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.02)
        assert first.poll() is None and second.poll() is None
    os.kill(second.pid, signal.SIGSTOP)
    code_first, said = end(first)
    assert code_first == 1 and "the connection to machine 1" in said
    os.kill(second.pid, signal.SIGCONT)
    code_second, said = end(second)
    assert code_second == 1 and "127.0.0.1" in said and "was lost" in said


def test_a_machine_that_does_not_come_is_named(tmp_path: Path) -> None:
    [port] = free_ports(1)
    code, said = end(start(0, "pass", tmp_path, port, connect_s=1.0))
    assert code == 2 and "NODE_RANK 1 did not come within 1 s" in said


def test_a_first_machine_that_is_not_there_is_named(tmp_path: Path) -> None:
    [port] = free_ports(1)
    code, said = end(start(1, "pass", tmp_path, port, connect_s=1.0))
    assert code == 2 and f"cannot be reached at 127.0.0.1:{port}" in said


def test_two_machines_with_the_same_number_are_refused(tmp_path: Path) -> None:
    [port] = free_ports(1)
    nodes = [start(0, "pass", tmp_path, port), start(1, "pass", tmp_path, port, nodes={"num_nodes": 3})]
    ends = [end(node) for node in nodes]
    assert [code for code, _ in ends] == [2, 2]
    assert all("has NNODES 3, the first machine has 2" in said for _, said in ends)


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as other:
        code, said = end(start(0, "pass", tmp_path, other.getsockname()[1]))
    assert code == 5 and "another program has this port" in said


@pytest.mark.parametrize("num_failures", [2, 10**6])
def test_a_name_that_does_not_resolve_yet_is_waited_for(
    num_failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a Kubernetes pod resolves only after the pod has started."""
    tried, create = list[Any](), socket.create_server

    def create_later(place: tuple[str, int], **more: Any) -> socket.socket:
        tried.append(place)
        if len(tried) <= num_failures:
            raise socket.gaierror("Name or service not known")
        return create(("127.0.0.1", place[1]), **more)

    monkeypatch.setattr("socket.create_server", create_later)
    monkeypatch.setattr(hub, "RESOLVE_S", 0.01)
    nodes = Nodes(num_nodes=2, master_addr="run-0.run", master_port=free_ports(1)[0])
    listening = hub.Hub(nodes=nodes, max_restarts=0, connect_s=0.2, lost_s=1.0)
    if num_failures == 2:
        listening.start()
        assert len(tried) == 3
    else:
        with pytest.raises(UserError, match="cannot listen on run-0"):
            listening.start()
        assert len(tried) > 3
