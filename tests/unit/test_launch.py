"""The launcher, with small programs in the place of ranks; and how a process learns that it is one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from crosstune.core.errors import EXIT_PORT_TAKEN, UserError
from crosstune.distributed import launch as launching
from crosstune.distributed.environment import ranks_in
from crosstune.distributed.launch import Outcome, launch, ring_environments

START = "import os, signal, sys, time, pathlib; rank = int(os.environ['MLX_RANK'])\n"


def run(code: str, *words: str, size: int = 2) -> Outcome:
    command = [sys.executable, "-S", "-c", START + code, *words]
    return launch(command, size=size, environments=ring_environments)


@pytest.mark.parametrize(
    ("code", "expected"),
    [("pass", 0), ("sys.exit(3)", 3), ("sys.exit(2)", 2), ("sys.exit(0 if rank else 3)", 3)],
)
def test_the_code_of_a_family_that_ends_in_order(code: str, expected: int) -> None:
    assert run(code) == Outcome(code=expected)


def test_who_fails_is_named_with_its_last_words_and_the_others_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launching, "PATIENCE_S", 0.2)
    started = time.monotonic()
    outcome = run("print('no more memory') if rank == 1 else time.sleep(60); sys.exit(7)", size=3)
    assert time.monotonic() - started < 20
    assert outcome.code == 7
    assert "process 1 of 3 (counted from 0) ended with code 7" in outcome.lines[0]
    assert "  1 | no more memory" in outcome.lines


def test_who_does_not_listen_to_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "PATIENCE_S", 0.5)
    monkeypatch.setattr(launching, "GRACE_S", 0.5)
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif rank: os.kill(os.getpid(), 9)\ntime.sleep(60)"
    outcome = run(code)
    assert outcome.code == 128 + signal.SIGKILL
    assert "process 1 of 2 (counted from 0) was killed by SIGKILL" in outcome.lines[0]


def test_who_lost_the_others_is_not_who_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run("time.sleep(0 if rank == 0 else 0.5); sys.exit(1 if rank == 2 else 4)", size=3)
    assert outcome.code == 1
    assert "process 2 of 3" in outcome.lines[0]


def test_a_port_that_was_taken_is_tried_again(tmp_path: Path) -> None:
    code = f"p = pathlib.Path(sys.argv[1])\nif rank == 0 and not p.exists(): p.touch(); sys.exit({EXIT_PORT_TAKEN})\n"
    assert run(code + "time.sleep(0.2)", str(tmp_path / "tried")) == Outcome(code=0)


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
    monkeypatch.setattr(launching, "PATIENCE_S", 0.3)
    code = """
for n in (signal.SIGINT, signal.SIGTERM): signal.signal(n, signal.SIG_IGN)
(pathlib.Path(sys.argv[1]) / f"ready-{rank}").touch()
time.sleep(60)
"""

    def send() -> None:
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.01)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)

    threading.Thread(target=send, daemon=True).start()
    started = time.monotonic()
    assert run(code, str(tmp_path)).code == 130
    assert time.monotonic() - started < 20


def test_a_process_stops_when_its_launcher_is_gone(tmp_path: Path) -> None:
    pidfile = tmp_path / "pid"
    child = f"""
import os, pathlib, time
from crosstune.distributed.launch import follow
follow(os.getppid())
pathlib.Path({str(pidfile)!r}).write_text(str(os.getpid()))
time.sleep(60)
"""
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    launcher = subprocess.Popen([sys.executable, "-c", parent])
    deadline = time.monotonic() + 60
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


def hostfile(tmp_path: Path, text: str) -> str:
    path = tmp_path / "hosts.json"
    path.write_text(text)
    return str(path)


def test_a_process_learns_its_place(tmp_path: Path) -> None:
    hosts = [["10.0.0.1:5000", "10.0.0.9:5000"], ["10.0.0.2:5000"], ["10.0.0.2:5001"]]
    environment = {"MLX_HOSTFILE": hostfile(tmp_path, json.dumps(hosts)), "MLX_RANK": "2"}
    ranks = ranks_in(environment)
    assert ranks is not None
    assert (ranks.engine, ranks.rank, ranks.size, ranks.local_rank, ranks.local_size) == ("mlx", 2, 3, 1, 2)
    assert ranks.launcher is None and not ranks.first


def test_a_process_on_its_own_is_no_rank(tmp_path: Path) -> None:
    assert ranks_in({}) is None
    assert ranks_in({"MLX_HOSTFILE": hostfile(tmp_path, "\n"), "MLX_RANK": "0"}) is None


@pytest.mark.parametrize(
    ("text", "rank", "words"),
    [
        ("{", "0", "is not a host file"),
        ('[{"ssh": "mac1"}, {"ssh": "mac2"}]', "0", "is not a host file"),
        ('[["a:1"], ["b:1"]]', "2", "MLX_RANK cannot be '2'"),
        ('[["a:1"], ["b:1"]]', "-1", "MLX_RANK cannot be '-1'"),
        (None, "0", "Cannot read the host file"),
        ("", "0", "do not form a ring"),
    ],
)
def test_what_is_wrong_with_a_ring_is_said(text: str | None, rank: str, words: str, tmp_path: Path) -> None:
    path = str(tmp_path / "missing") if text is None else hostfile(tmp_path, text) if text else ""
    with pytest.raises(UserError, match=words):
        ranks_in({"MLX_HOSTFILE": path, "MLX_RANK": rank})


def test_a_torch_rank_is_refused_rather_than_trained_alone() -> None:
    with pytest.raises(UserError, match="rank 1 of 2"):
        ranks_in({"RANK": "1", "WORLD_SIZE": "2"})
    assert ranks_in({"RANK": "0", "WORLD_SIZE": "1"}) is None
