"""Find the rank that hangs from the posted states, and end every rank."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from crosstune.core.errors import EXIT_HUNG
from crosstune.distributed.watchdog import FolderBoard, HangDetector, Watchdog
from crosstune.process.ranks import Activity, Ranks, RankState


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


def test_where_all_wait_for_each_other_all_are_named() -> None:
    lines = HangDetector(10.0).verdict({rank: state(rank, still_s=12.0) for rank in (0, 1)}, now=0.0)
    assert [line[:6] for line in lines] == ["rank 0", "rank 1"]


def test_a_rank_posts_what_it_does_and_since_when(tmp_path: Path) -> None:
    board, activity = FolderBoard(tmp_path), Activity()
    watchdog = Watchdog(Ranks(rank=2, size=3, host="h"), activity, limit_s=1.0, own=board)
    activity.start("step 9: checkpoint")
    watchdog.start()
    try:
        until = time.monotonic() + 600
        while not (posted := board.read()) or posted[2].still_s < 0.2:
            assert time.monotonic() < until
            threading.Event().wait(0.5)  # one place in the code for a while
        assert (posted[2].host, posted[2].doing) == ("h", "step 9: checkpoint")
        assert not posted[2].waits
    finally:
        watchdog.stop()


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


STOPPED_BOARD = """
import sys, threading, time, pathlib
from crosstune.process.ranks import Activity
from crosstune.process.ranks import Ranks, RankState
from crosstune.distributed.watchdog import Watchdog

class Board:
    \"\"\"Answers a few times; later each answer is seen before the time at which it came is noted.\"\"\"
    asked, own = 0, None
    def post(self, state):
        self.own = state
    def read(self):
        self.asked += 1
        if self.asked > 4: threading.Event().wait()
        first = RankState(rank=0, host="h0", beat=self.asked, doing="step 1: data", at="", still_s=0.0, waits=False)
        watchdog._states = {0: first, 1: self.own}
        time.sleep(0.15)
        return watchdog._states

watchdog = Watchdog(Ranks(rank=1, size=2, host="h1"), Activity(), limit_s=2.0, shared=Board())
watchdog.start()
until = time.monotonic() + 3600
while time.monotonic() < until: time.sleep(0.001)
"""


def test_a_stopped_rank_0_is_named_and_not_the_rank_that_asks_it() -> None:
    """Its store no longer answers, so a rank does not see what it posted itself."""
    ended = subprocess.run(
        [sys.executable, "-c", STOPPED_BOARD], capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == EXIT_HUNG
    assert "rank 0 (host h0) is stopped or its node is down" in ended.stderr
    assert "rank 1" not in ended.stderr and "Traceback" not in ended.stderr


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
