"""`crosstune launch --on ssh` with real processes: signals, failures, restarts and a killed terminal.

`ssh` is a stand-in that runs the remote command in a shell of this machine; the sshd of test_ssh_cluster.py is a real one.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from forks import Forked, fork

from crosstune.cli.main import main
from crosstune.core.errors import UserError
from crosstune.distributed.jobs import nodes
from crosstune.distributed.jobs.schedulers.ray import NodeActor

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no POSIX shell here")

SSH = """#!/bin/sh
for last; do :; done
exec sh -c "$last"
"""
# What the "machines" run instead of `crosstune train`: the first words of the command are `-m crosstune train`.
PYTHON = """#!/bin/sh
if [ "$2" = crosstune ]; then exec {python} {program} "$NODE_RANK"; fi
exec {python} "$@"
"""
START = """
import os, pathlib, signal, sys, time
node = int(sys.argv[1])
seen = []
def note(number, frame): seen.append(signal.Signals(number).name)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1): signal.signal(number, note)
def ready(): pathlib.Path(f"ready-{node}").write_text(str(os.getpid()))
def until_signalled():
    ready()
    while not seen: time.sleep(0.01)
    pathlib.Path(f"seen-{node}").write_text(" ".join(seen))
print(f"node {node} of {os.environ['NNODES']} at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", flush=True)
"""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[object]:
    """Start `crosstune launch` on two machines that run a program; those left at the end are killed."""
    started: list[Forked] = []

    def start(code: str, *words: str, patience_s: float = 900.0) -> Forked:
        """`patience_s` is the time that the others have to end by themselves after one failed."""
        tools = tmp_path / "tools"
        tools.mkdir()
        (tmp_path / "program.py").write_text(START + code)
        wrapper = PYTHON.format(python=shlex.quote(sys.executable), program=tmp_path / "program.py")
        for name, text in (("ssh", SSH), ("python", wrapper)):
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        command = ["launch", "--on", "ssh", "--nnodes", "2", "--hosts", "alpha,beta"]
        command += ["--python", str(tools / "python"), *words]

        def run() -> int:
            os.chdir(tmp_path)
            os.environ["PATH"] = f"{tools}:{os.environ['PATH']}"
            nodes.PATIENCE_S, nodes.SETTLE_S = patience_s, 0.2
            return main(command)

        started.append(fork(run, said=tmp_path / "said"))
        return started[-1]

    yield start
    for forked in started:
        forked.process.kill()
        forked.process.join()
    for mark in tmp_path.glob("ready-*"):
        if psutil.pid_exists(pid := int(mark.read_text() or 0)) and pid:
            os.kill(pid, signal.SIGKILL)


def wait_for(*paths: Path) -> None:
    while not all(path.exists() and path.read_text() for path in paths):
        time.sleep(0.02)


def test_all_machines_start_and_only_the_first_talks(launch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    code, out = launch("ready(); sys.exit(0)").end()
    assert code == 0
    assert out == "logging in to 2 nodes ...\nnode 0 of 2 at alpha:29500\n"
    assert (tmp_path / "ready-1").exists()


def test_a_failed_machine_is_named_and_all_start_again(launch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    code = """
tried = pathlib.Path("tried")
if tried.exists(): sys.exit(0)
if node == 0: until_signalled(); sys.exit(4)
while not pathlib.Path("ready-0").exists(): time.sleep(0.01)
tried.touch(); print("no more memory", flush=True); sys.exit(7)
"""
    ended, out = launch(code, patience_s=0.5).end()
    assert ended == 0, out
    assert "node 1 of 2 (counted from 0), beta, exited with code 7" in out
    assert "  beta | no more memory" in out and "(1 of 3 times)" in out
    assert (tmp_path / "seen-0").read_text() == "SIGTERM"  # it was asked to save first


def test_a_lost_machine_is_named_also_when_the_others_end_with_an_error(launch) -> None:  # type: ignore[no-untyped-def]
    program = """
if node == 0: until_signalled(); sys.exit(1)
while not pathlib.Path("ready-0").exists(): time.sleep(0.01)
sys.exit(255)
"""
    code, out = launch(program, "--restarts", "0", patience_s=0.5).end()
    assert code == 4
    assert "node 1 of 2 (counted from 0), beta, was lost" in out


def test_it_gives_up_after_the_restarts(launch) -> None:  # type: ignore[no-untyped-def]
    code, out = launch("sys.exit(7)", "--restarts", "1").end()
    assert code == 7
    assert out.count("node 0 of 2 at") == 2 and "(1 of 1 times)" in out


def test_a_wrong_request_is_not_tried_again(launch) -> None:  # type: ignore[no-untyped-def]
    code, out = launch("print('no such option', flush=True); sys.exit(2)").end()
    assert code == 2
    assert out.count("node 0 of 2 at") == 1 and "no such option" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_every_machine_by_its_name(launch, tmp_path: Path, number: signal.Signals) -> None:  # type: ignore[no-untyped-def]
    process = launch("until_signalled(); sys.exit(3)")
    wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
    os.kill(process.pid, number)
    assert process.end()[0] == 3
    assert [(tmp_path / f"seen-{node}").read_text() for node in (0, 1)] == [number.name] * 2


def test_machines_stop_when_the_terminal_is_gone(launch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    process = launch("until_signalled(); sys.exit(3)")
    wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
    process.process.kill()
    wait_for(tmp_path / "seen-0", tmp_path / "seen-1")
    assert (tmp_path / "seen-1").read_text() == "SIGTERM"


def test_the_actor_of_ray_starts_follows_and_signals_a_launcher(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        START + "print(os.environ.get('RANK')); until_signalled(); sys.exit(3)"
    )
    actor, lines = NodeActor(), list[str]()
    assert 0 < actor.free_port("127.0.0.1") < 65536
    variables = {"NNODES": "1", "MASTER_ADDR": "here", "MASTER_PORT": "1", "RANK": "5"}
    actor.start(["", str(tmp_path / "program.py"), "0"], variables, str(tmp_path))
    wait_for(tmp_path / "ready-0")
    actor.send("SIGUSR1")
    code = None
    while code is None:
        code, new = actor.poll()
        lines += new
        time.sleep(0.02)
    assert (code, lines) == (3, ["node 0 of 1 at here:1", "None"])
    assert (tmp_path / "seen-0").read_text() == "SIGUSR1"


def test_the_actor_of_ray_names_a_folder_that_is_not_shared(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a folder that all nodes share"):
        NodeActor().start(["", "-c", "pass"], {}, str(tmp_path / "elsewhere"))
