"""Abort a run when a rank hangs, and report the rank, its host and its place in the code.

A thread in each rank posts its current work and the time since its main thread last moved. All ranks and the launcher read
the posts; the launcher also notices when all ranks are stopped.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from crosstune.core.errors import EXIT_HUNG, EXIT_PEER_LOST
from crosstune.process.ranks import Activity, Board, BoardLost, Ranks, RankState
from crosstune.process.this_process import ActiveClock

_COLLECTIVE = ("torch/distributed/", "torch/autograd/graph.py", "_engine/group.py", "_engine/sharding/")
"""Path fragments of code that waits for other ranks."""
_OWN = ("crosstune/", "torch/distributed/")
"""Path fragments of code that is reported as a rank's place."""
STOP_S = 2.0
"""Time for the watchdog's threads to exit after the run."""
_LOST_S = 10.0
"""Time for a rank to notice by itself that rank 0, which hosts the board, has exited."""
Stack = Sequence[tuple[FrameType, int]]
"""Frames with their lines, innermost first."""


class FolderBoard:
    """A board for the ranks of one node and their launcher, in the launcher's private folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def post(self, state: RankState) -> None:
        path = self._folder / f"rank-{state.rank}.state"
        staged = path.with_suffix(".new")
        with contextlib.suppress(OSError):  # the launcher has removed its folder, or the disk is full
            staged.write_text(state.to_text(), encoding="utf-8")
            staged.replace(path)

    def read(self) -> dict[int, RankState]:
        states: dict[int, RankState] = {}
        for path in self._folder.glob("rank-*.state"):
            with contextlib.suppress(OSError, ValueError, TypeError):
                state = RankState.from_text(path.read_text(encoding="utf-8"))
                states[state.rank] = state
        return states

    def clear(self) -> None:
        """Forget the ranks of an earlier attempt."""
        for path in self._folder.glob("rank-*.state"):
            path.unlink(missing_ok=True)


class HangDetector:
    """Identify the hung rank from the states posted by all ranks."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._beats: dict[int, tuple[int, float]] = {}

    def verdict(self, states: Mapping[int, RankState], now: float) -> list[str]:
        """Return the lines that identify the hung rank; none while no rank hangs."""
        silent = {rank: self._silent_s(state, now) for rank, state in states.items()}
        stopped = [state for rank, state in states.items() if silent[rank] > self._limit_s]
        still = [state for state in states.values() if state.still_s > self._limit_s]
        if not stopped and not still:
            return []
        blamed = stopped or [state for state in states.values() if not state.waits] or still
        how = "is stopped or its node is down" if stopped else "hangs"
        longest = max(silent[s.rank] if stopped else s.still_s for s in (stopped or still))
        lines = [
            f"rank {state.rank} (host {state.host}) {how}: it has made no progress for {longest:.0f} s. It was in: "
            f"{state.place()}"
            for state in blamed
        ]
        others = [state for state in states.values() if state not in blamed]
        return lines + [f"  {state.sentence()}" for state in others[:8]]

    def _silent_s(self, state: RankState, now: float) -> float:
        beat, since = self._beats.get(state.rank, (-1, now))
        if beat != state.beat:
            since = now
        self._beats[state.rank] = (state.beat, since)
        return now - since


class Watchdog:
    """Threads that watch this rank and, through the shared board, all others."""

    def __init__(
        self,
        ranks: Ranks,
        activity: Activity,
        *,
        limit_s: float,
        own: Board | None = None,
        shared: Board | None = None,
    ) -> None:
        self._ranks, self._activity = ranks, activity
        self._own, self._shared = own, shared
        self.poll_s = min(1.0, limit_s / 20)
        # Just before the limit, at which the collective times out without identifying a rank.
        self._detector = HangDetector(limit_s - 3 * self.poll_s)
        self._limit_s = limit_s
        self._main = threading.main_thread().ident
        self._place: object = None
        self._clock = ActiveClock()  # a suspended job does not hang
        self._moved = self._answered = self._clock.now()
        self._beat = 0
        self._latest: RankState | None = None
        self._states: Mapping[int, RankState] = {}
        self._lost = False
        self._done = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        for act in (self._watch, *((self._exchange,) if self._shared is not None else ())):
            self._threads.append(threading.Thread(target=act, daemon=True, name="crosstune-watchdog"))
            self._threads[-1].start()

    def stop(self) -> bool:
        """Stop watching; return True if the threads have exited: one may wait for a store that does not answer."""
        self._done.set()
        until = time.monotonic() + STOP_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def state(self) -> RankState:
        """Return the current state of this rank."""
        stack = list(traceback.walk_stack(sys._current_frames().get(self._main or 0)))
        place = (self._activity.name, *((id(frame.f_code), frame.f_lasti) for frame, _ in stack))
        now = self._clock.now()
        if place != self._place:
            self._place, self._moved = place, now
        self._beat += 1
        return RankState(
            rank=self._ranks.rank,
            host=self._ranks.host,
            beat=self._beat,
            doing=self._activity.name,
            at=_where(stack),
            still_s=now - self._moved,
            waits=_waits(stack),
        )

    def _exchange(self) -> None:
        """Post to the shared board and read it. A separate thread, because the board may be in a stopped process."""
        assert self._shared is not None
        while not self._done.wait(self.poll_s):
            try:
                if self._latest is not None:
                    self._shared.post(self._latest)
                self._states = self._shared.read()
            except BoardLost:
                self._lost = True
                return
            self._answered = self._clock.now()

    def _watch(self) -> None:
        while not self._done.wait(self.poll_s):
            self._latest = state = self.state()
            now = self._clock.now()
            if self._own is not None:
                self._own.post(state)
            if self._shared is None:
                continue
            if not self._lost:
                self._check_ranks(now)
            elif now - self._answered > _LOST_S and state.still_s > _LOST_S:
                line = f"rank 0 has exited, and rank {state.rank} still waits: {state.sentence()}"
                self._end([line], EXIT_PEER_LOST)

    def _check_ranks(self, now: float) -> None:
        silent_s = now - self._answered
        if silent_s > self._limit_s - 3 * self.poll_s:
            last = self._states.get(0)
            host, was = (
                (f" (host {last.host})", f" It was in: {last.place()}") if last is not None else ("", "")
            )
            line = (
                f"rank 0{host} is stopped or its node is down: it has not answered for {silent_s:.0f} s.{was}"
            )
            self._end([line], EXIT_HUNG)
        elif silent_s > 3 * self.poll_s:
            return  # the board is stale, so its states say nothing about other ranks
        elif lines := self._detector.verdict(self._states, now):
            self._end(lines, EXIT_HUNG)

    def _end(self, lines: Sequence[str], code: int) -> None:
        if self._done.is_set():
            return
        if any(line.startswith(f"rank {self._ranks.rank} ") for line in lines):
            faulthandler.dump_traceback(file=sys.stderr)  # first: the launcher shows the last lines
        first = min((rank for rank in self._states if rank != 0 or self._ranks.first), default=0)
        if self._ranks.rank in (0, first):
            print("\n".join(f"crosstune: {line}" for line in lines), file=sys.stderr, flush=True)
        else:
            time.sleep(1.0)  # one process prints it
        os._exit(code)


class LauncherWatch:
    """The launcher's check of the ranks on its node; it also notices when all are stopped."""

    def __init__(self, board: Board, *, limit_s: float, clock: Callable[[], float] | None = None) -> None:
        self._board, self._clock = board, clock or ActiveClock().now
        self._detector = HangDetector(limit_s + 1.0)  # later than the ranks, which know more
        self._next = 0.0

    def verdict(self) -> list[str]:
        """Return the lines that identify a hung rank; read the board at most twice a second."""
        now = self._clock()
        if now < self._next:
            return []
        self._next = now + 0.5
        return self._detector.verdict(self._board.read(), now)


def _where(stack: Stack) -> str:
    """Return the innermost function of crosstune or torch.distributed, the function it called, and its line."""
    for frame, line in stack:
        path = frame.f_code.co_filename.replace(os.sep, "/")
        if any(part in path for part in _OWN):
            inner = f" > {stack[0][0].f_code.co_name}" if stack[0][0] is not frame else ""
            return f"{frame.f_code.co_name}{inner} ({'/'.join(path.split('/')[-2:])}:{line})"
    return ""


def _waits(stack: Stack) -> bool:
    """True if the innermost frames belong to a collective."""
    paths = [frame.f_code.co_filename.replace(os.sep, "/") for frame, _ in stack[:12]]
    return any(part in path for path in paths for part in _COLLECTIVE)
