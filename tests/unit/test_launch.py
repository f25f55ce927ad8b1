"""The launcher, with small programs as ranks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from crosstune.cli.commands.start_ranks import check_memory_of_libraries
from crosstune.core.errors import EXIT_HUNG, EXIT_PORT_TAKEN, EXIT_USER_MUST_ACT, UserError
from crosstune.distributed import launch as running
from crosstune.distributed.attempts import Outcome
from crosstune.distributed.launch import launch, ring_environments
from crosstune.distributed.master import free_ports

FOREVER = "time.sleep(3600)"
"""Longer than a test may take: whoever does so must be ended by the launcher for the test to end."""
START = "import os, signal, sys, time, pathlib; rank = int(os.environ['MLX_RANK'])\n"


def run(code: str, *words: str, size: int = 2, **options: Any) -> Outcome:
    command = [sys.executable, "-S", "-c", START + code, *words]
    return launch(command, num_local=size, environments=ring_environments, **options)


@pytest.mark.parametrize(
    ("code", "expected"), [("pass", 0), ("sys.exit(2)", 2), ("sys.exit(0 if rank else 3)", 3)]
)
def test_the_code_of_a_family_that_ends_in_order(code: str, expected: int) -> None:
    assert run(code) == Outcome(code=expected)


def test_who_fails_is_named_with_its_last_words_and_the_others_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "PATIENCE_S", 0.2)
    outcome = run(f"print('no more memory') if rank == 1 else {FOREVER}; sys.exit(7)", size=3)
    assert outcome.code == 7
    assert outcome.lines[0].startswith(
        f"process 1 of 3 (counted from 0, host {socket.gethostname()}) exited with code 7"
    )
    assert "  1 | no more memory" in outcome.lines


def test_who_does_not_listen_to_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "PATIENCE_S", 0.5)
    monkeypatch.setattr(running, "GRACE_S", 0.5)
    code = f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif rank: os.kill(os.getpid(), 9)\n{FOREVER}"
    outcome = run(code)
    assert outcome.code == 128 + signal.SIGKILL
    assert outcome.lines[0].startswith("process 1 of 2 (") and "was killed by SIGKILL" in outcome.lines[0]


def test_who_lost_the_others_is_not_who_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "PATIENCE_S", 900.0)
    outcome = run("time.sleep(0 if rank == 0 else 0.5); sys.exit(1 if rank == 2 else 4)", size=3)
    assert outcome.code == 1
    assert "process 2 of 3" in outcome.lines[0]


def test_a_port_that_was_taken_is_tried_again(tmp_path: Path) -> None:
    code = f"p = pathlib.Path(sys.argv[1])\nif rank == 0 and not p.exists(): p.touch(); sys.exit({EXIT_PORT_TAKEN})\n"
    assert run(code + "time.sleep(0.2)", str(tmp_path / "tried")) == Outcome(code=0)


def test_a_port_that_was_asked_for_is_tried_once(tmp_path: Path) -> None:
    code = f"open(sys.argv[1], 'a').write('x') if rank == 0 else None; sys.exit(0 if rank else {EXIT_PORT_TAKEN})"
    assert run(code, str(tmp_path / "tries"), port=free_ports(1)[0]).code == EXIT_USER_MUST_ACT
    assert (tmp_path / "tries").read_text() == "x"


KILLED_ONCE = """
tries = pathlib.Path(sys.argv[1]) / f"try-{rank}-{os.environ['CROSSTUNE_ATTEMPT']}"
tries.touch()
if rank == 1 and len(list(tries.parent.glob("try-1-*"))) <= int(sys.argv[2]): os.kill(os.getpid(), 9)
"""


def test_a_killed_rank_is_started_again_with_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "PATIENCE_S", 900.0)  # the other one ends by itself, however late it starts
    said: list[str] = []
    outcome = run(KILLED_ONCE, str(tmp_path), "2", max_restarts=2, say=said.extend)
    assert outcome == Outcome(code=0)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"try-{rank}-{attempt}" for rank in (0, 1) for attempt in (0, 1, 2)]
    assert [line.partition("(restart")[2] for line in said] == [" 1 of 2).", " 2 of 2)."]


def test_restarts_are_used_up(tmp_path: Path) -> None:
    outcome = run(KILLED_ONCE, str(tmp_path), "2", max_restarts=1)
    assert outcome.code == 128 + signal.SIGKILL
    assert "was killed by SIGKILL" in outcome.lines[0]


@pytest.mark.parametrize("code", [EXIT_USER_MUST_ACT, EXIT_HUNG])
def test_what_a_restart_does_not_mend_is_not_tried_again(code: int, tmp_path: Path) -> None:
    path = tmp_path / "tries"
    program = (
        f"open(sys.argv[1], 'a').write('x') if rank else time.sleep(0.3); sys.exit({code} if rank else 0)"
    )
    assert run(program, str(path), max_restarts=3).code in (EXIT_USER_MUST_ACT, 1)
    assert path.read_text() == "x"


def test_a_hung_rank_ends_the_others_at_once() -> None:
    outcome = run(f"print('rank 0 hangs') if rank else {FOREVER}; sys.exit({EXIT_HUNG})")
    assert outcome.code == 1
    assert "  1 | rank 0 hangs" in outcome.lines


def test_the_launcher_sees_ranks_that_are_all_stopped() -> None:
    state = "{'rank': rank, 'host': 'h', 'beat': 1, 'doing': 'step 7: data', 'at': '', 'still_s': 0.0, 'waits': False}"
    code = f"""
import json
folder = pathlib.Path(os.environ["CROSSTUNE_LAUNCH_FOLDER"])
while rank and not (folder / "rank-0.state").exists(): time.sleep(0.01)
(folder / f"rank-{{rank}}.state").write_text(json.dumps({state}))
os.kill(os.getpid(), signal.SIGSTOP)
"""
    outcome = run(code, collective_s=0.2)
    assert outcome.code == 1
    assert any("rank 0 (host h) is stopped" in line and "step 7: data" in line for line in outcome.lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_process_once(number: signal.Signals, tmp_path: Path) -> None:
    code = """
seen = []
for n in (signal.SIGINT, signal.SIGTERM): signal.signal(n, lambda n, f: seen.append(n))
folder = pathlib.Path(sys.argv[1])
(folder / f"ready-{rank}").touch()
while not seen: time.sleep(0.01)
time.sleep(0.3)
(folder / f"seen-{rank}").write_text(str(seen))
sys.exit(3)
"""

    def send() -> None:
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    assert run(code, str(tmp_path)) == Outcome(code=3)
    assert [(tmp_path / f"seen-{rank}").read_text() for rank in (0, 1)] == [f"[{int(number)}]"] * 2


def test_a_second_signal_does_not_wait_for_who_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "PATIENCE_S", 0.3)
    monkeypatch.setattr(running, "GRACE_S", 3600.0)  # after one signal alone it would wait for them
    code = f"""
folder = pathlib.Path(sys.argv[1])
for n in (signal.SIGINT, signal.SIGTERM): signal.signal(n, lambda n, f: (folder / f"heard-{{rank}}").touch())
(folder / f"ready-{{rank}}").touch()
while True: {FOREVER}
"""

    def send() -> None:
        for word in ("ready", "heard"):
            while len(list(tmp_path.glob(f"{word}-*"))) < 2:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()
    assert run(code, str(tmp_path)).code == 130


def test_a_process_stops_when_its_launcher_is_gone(tmp_path: Path) -> None:
    pidfile = tmp_path / "pid"
    child = f"""
import os, pathlib, time
from crosstune.distributed.launch import follow
follow(os.getppid())
pathlib.Path({str(pidfile)!r}).write_text(str(os.getpid()))
time.sleep(3600)
"""
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    launcher = subprocess.Popen([sys.executable, "-c", parent])
    deadline = time.monotonic() + 600
    while not (pidfile.exists() and pidfile.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    launcher.kill()
    launcher.wait()
    while _is_running(int(pidfile.read_text())):
        assert time.monotonic() < deadline, "it goes on without its launcher"
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_more_processes_than_the_memory_holds_are_refused() -> None:
    check_memory_of_libraries(8, memory_bytes=16 << 30, cores=2)
    with pytest.raises(UserError, match="65,536 processes") as caught:
        check_memory_of_libraries(65_536, memory_bytes=16 << 30, cores=2)
    assert "--world_size 2" in caught.value.do
