"""Find the hung rank from the posted states and end every rank; a suspension is not a hang."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from crosstune.core.errors import EXIT_HUNG
from crosstune.distributed.links import Channel
from crosstune.distributed.watchdog import HangDetector, LauncherWatch
from crosstune.process.ranks import RankState
from crosstune.process.this_process import GAP_S, ActiveClock


def state(rank: int, **more: Any) -> RankState:
    fields: dict[str, Any] = {
        "host": f"h{rank}",
        "beat": 1,
        "doing": "step 3: backward",
        "at": "all_reduce (x.py:1)",
    }
    return RankState(rank=rank, **fields | {"still_s": 0.0, "waits": True} | more)


def test_a_rank_that_no_longer_posts_is_stopped() -> None:
    judge = HangDetector(10.0)
    judge.verdict({0: state(0), 1: state(1)}, now=0.0)
    [line, other] = judge.verdict({0: state(0, beat=2, still_s=10.5), 1: state(1)}, now=10.5)
    assert line.startswith("rank 1 (host h1) is stopped") and "step 3: backward, all_reduce" in line
    assert other.startswith("  rank 0 (host h0)")


def test_the_rank_that_does_not_wait_for_others_is_named() -> None:
    waiting, reading = (
        state(0, still_s=11.0),
        state(1, doing="step 4: data", at="read (y.py:2)", waits=False, still_s=1.0),
    )
    [line, _] = HangDetector(10.0).verdict({0: waiting, 1: reading}, now=0.0)
    assert line.startswith("rank 1 (host h1) hangs") and "11 s. It was in: step 4: data, read" in line


HANG = """
import sys, threading, time, pathlib
from crosstune.process.ranks import Activity, Ranks
from crosstune.distributed.watchdog import FolderBoard, Watchdog
rank, board, activity = int(sys.argv[1]), FolderBoard(pathlib.Path(sys.argv[2])), Activity()
activity.start("step 1: data")
Watchdog(Ranks(rank=rank, size=2, host="h"), activity, limit_s=5.0, shared=board).start()
until = time.monotonic() + 3600
if rank: threading.Event().wait()
while time.monotonic() < until: time.sleep(0.001)
"""


def test_every_rank_ends_when_one_hangs(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", HANG, str(rank), str(tmp_path)] for rank in (0, 1)]
    ranks = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    ends = [(rank.communicate(timeout=600)[1], rank.returncode) for rank in ranks]
    assert [code for _, code in ends] == [EXIT_HUNG, EXIT_HUNG]
    assert "rank 1 (host h) hangs" in ends[0][0] and "step 1: data" in ends[0][0]


FAILS = """
import atexit, os, sys
from crosstune.cli import main as module
from crosstune.core.errors import UserError
from crosstune.process.this_process import note_connected, note_left
word = ""
atexit.register(lambda: print(f"{word} shut down"))
def fail(words):
    note_connected()
    if word == "done":
        note_left()
        return 0
    print(f"{word} printed before")
    raise UserError("a rank failed") if word == "asked" else ZeroDivisionError("a bug")
module._main = fail
codes = []
for word in ("asked", "bug", "done"):
    child = os.fork()
    if not child:
        sys.exit(module.main())
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(codes, flush=True)
os._exit(0)
"""


def test_a_rank_that_fails_ends_without_the_shutdown_of_python() -> None:
    """Its threads may be inside torch, waiting for other ranks."""
    command = [sys.executable, "-c", FAILS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    said = ["asked printed before", "bug printed before", "done shut down", "[2, 1, 0]"]
    assert ended.stdout.splitlines() == said
    assert "a rank failed" in ended.stderr and "ZeroDivisionError: a bug" in ended.stderr


class Times:
    """Wall time and CPU time that a test sets."""

    def __init__(self) -> None:
        self.wall_s, self.cpu_s = 1000.0, 5.0

    def clock(self) -> ActiveClock:
        return ActiveClock(wall=lambda: self.wall_s, cpu=lambda: self.cpu_s)


def test_only_a_gap_without_cpu_time_is_a_suspension() -> None:
    times = Times()
    clock = times.clock()
    start = clock.now()
    times.wall_s += 0.9 * GAP_S  # as much as a wait for a device takes between two ticks
    assert clock.now() - start == pytest.approx(0.9 * GAP_S)
    times.wall_s += 600.0
    assert clock.now() - start == pytest.approx(0.9 * GAP_S)
    times.wall_s, times.cpu_s = times.wall_s + 20.0, times.cpu_s + 19.0  # no other thread got its turn
    assert clock.now() - start == pytest.approx(0.9 * GAP_S + 20.0)


def test_machines_that_were_suspended_together_have_not_lost_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = Times()
    monkeypatch.setattr("crosstune.distributed.links.ActiveClock", times.clock)
    with socket.create_server(("127.0.0.1", 0)) as server, closing(socket.socket()) as silent:
        silent.connect(server.getsockname())
        with closing(Channel(server.accept()[0])) as launcher:
            times.wall_s += 3600.0
            assert launcher.silent_s() == 0.0
            times.wall_s, times.cpu_s = times.wall_s + 40.0, times.cpu_s + 40.0
            assert launcher.silent_s() == 40.0


def test_a_job_that_was_suspended_as_a_whole_has_no_rank_that_hangs() -> None:
    times = Times()
    state = RankState(rank=0, host="here", beat=1, doing="step 3", at="", still_s=0.0, waits=False)

    class Board:
        def read(self) -> dict[int, RankState]:
            return {0: state}

    watch = LauncherWatch(Board(), limit_s=60.0, clock=times.clock().now)  # type: ignore[arg-type]
    assert watch.verdict() == []
    times.wall_s += 3600.0
    assert watch.verdict() == []
    for _ in range(70):
        times.wall_s += 1.0
        said = watch.verdict()
    assert "rank 0 (host here) is stopped" in said[0]
