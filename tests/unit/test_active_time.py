"""The clock that stands still while the process is suspended, and what is measured with it."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from crosstune.distributed.links import Channel
from crosstune.distributed.watchdog import LauncherWatch
from crosstune.process.ranks import RankState
from crosstune.process.this_process import GAP_S, ActiveClock


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
