"""The clock that stands still while the process is suspended, and what is measured with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing

import pytest

from crosstune.core import limited_child
from crosstune.core.active_time import GAP_S, ActiveClock
from crosstune.core.ranks import RankState
from crosstune.data import render_process
from crosstune.data.render_types import ChatTokens, Rendered, RenderRow
from crosstune.data.rendering import Renderer
from crosstune.data.template_limits import Limits
from crosstune.distributed.channel import Channel
from crosstune.distributed.watchdog import LauncherWatch


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


def test_a_stopped_process_measures_no_time_and_no_limit_of_its_children_ends() -> None:
    """A real SIGSTOP, longer than each limit: of a step, of a child with limits, and of a rendering."""
    code = f"""
import os, sys, time
from crosstune.core.active_time import ActiveClock
from crosstune.data import render_process
from crosstune.data.rendering import Renderer
from crosstune.data.render_types import ChatTokens, RenderRow
from crosstune.data.template_limits import Limits
clock = ActiveClock()
with clock.ticking():
    started, wall = clock.now(), time.perf_counter()
    print("ready", flush=True)
    sys.stdin.readline()  # stopped meanwhile
    print(clock.now() - started, time.perf_counter() - wall, flush=True)
renderer = Renderer(Limits(stalled_s={GAP_S}))
row = RenderRow.of([{{"role": "user", "content": "x" * 3_000_000}}], kind="text")
look, read, stopped, begin = render_process._Watch.look, os.read, [], time.perf_counter()
def slow_read(fd, size):  # the worker has rendered, and waits until we take its answer
    return read(fd, 1 if size == 1 << 20 and not stopped and renderer._process is not None else size)
def look_and_stop(watch):
    why = look(watch)
    if not stopped and watch.last_cpu_s > 0 and time.perf_counter() > begin + 1.0:
        stopped.append(True)
        print("sent", flush=True)
        os.kill(os.getpid(), {int(signal.SIGSTOP)})
    return why
render_process.os.read, render_process._Watch.look = slow_read, look_and_stop
[result] = renderer.render_rows([row], ChatTokens(chat_template="{{{{ messages[0].content }}}}"))
print(len(result.text) if hasattr(result, "text") else result, flush=True)
renderer.close()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGSTOP)
        child.stdin.write("\n")
        child.stdin.flush()
        time.sleep(GAP_S + 1.5)
        child.send_signal(signal.SIGCONT)
        active_s, wall_s = map(float, child.stdout.readline().split())
        assert active_s < GAP_S < wall_s
        assert child.stdout.readline() == "sent\n"
        time.sleep(GAP_S + 1.5)
        child.send_signal(signal.SIGCONT)
        assert child.stdout.readline() == "3000000\n"
    finally:
        child.kill()
        child.communicate()


def test_another_process_takes_the_place_of_a_stopped_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_process, "_STOPPED_S", 0.2)
    echo = ChatTokens(chat_template="{{ messages[0].content }}")
    rows = [RenderRow.of([{"role": "user", "content": f"row {number}"}], kind="text") for number in range(3)]
    with closing(Renderer(Limits())) as renderer:
        renderer.render_rows(rows[:1], echo)
        assert renderer._process is not None
        stopped = renderer._process._child
        os.kill(stopped.pid, signal.SIGSTOP)
        texts = [row.text for row in renderer.render_rows(rows, echo) if isinstance(row, Rendered)]
        assert texts == ["row 0", "row 1", "row 2"]
        assert renderer._process is not None and renderer._process._child.pid != stopped.pid
        # Stopped for a moment, it goes on where it was.
        monkeypatch.setattr(render_process, "_STOPPED_S", 60.0)
        kept = renderer._process._child
        os.kill(kept.pid, signal.SIGSTOP)
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import os, time; time.sleep(0.5); os.kill({kept.pid}, {int(signal.SIGCONT)})",
            ]
        )
        assert [type(row) for row in renderer.render_rows(rows, echo)] == [Rendered] * 3
        assert renderer._process._child.pid == kept.pid


def start_child(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys, time; {code}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_child_with_limits_has_its_time_when_we_are_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times()
    monkeypatch.setattr(limited_child, "ActiveClock", times.clock)
    with start_child("n = len(sys.stdin.read()); time.sleep(1.5); print(n)") as child:
        communicate = child.communicate

        def suspended(*words: object, **settings: object) -> object:
            times.wall_s += 3600.0
            return communicate(*words, **settings)  # type: ignore[arg-type]

        monkeypatch.setattr(child, "communicate", suspended)
        assert limited_child._communicate(child, b"x" * 100_000, limit_s=5.0)[0] == b"100000\n"
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], stdout=subprocess.PIPE
    ) as child:
        times.wall_s, communicate = 0.0, child.communicate

        def slow(*words: object, **settings: object) -> object:
            times.wall_s, times.cpu_s = times.wall_s + 4.0, times.cpu_s + 4.0
            return communicate(timeout=0.01)

        monkeypatch.setattr(child, "communicate", slow)
        with pytest.raises(subprocess.TimeoutExpired):
            limited_child._communicate(child, b"", limit_s=5.0)
        child.kill()


def test_a_child_with_limits_gets_all_data_although_it_begins_to_read_late() -> None:
    with start_child("time.sleep(1.5); print(len(sys.stdin.read()))") as child:
        try:
            assert limited_child._communicate(child, b"x" * 1_000_000, limit_s=60.0)[0] == b"1000000\n"
        finally:
            child.kill()


def test_machines_that_were_suspended_together_have_not_lost_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = Times()
    monkeypatch.setattr("crosstune.distributed.channel.ActiveClock", times.clock)
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
