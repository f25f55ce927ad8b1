"""Profiles of steps: the recorded steps, their division into phases, and the printed table."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from unprivileged import as_other_user, reachable_folder

from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.core.events import Event, Profiled, StepMetrics, Warned
from crosstune.core.profiling import BACKWARD, DATA, FORWARD, Limits, Operator, Recorded, no_phase
from crosstune.loop.profile import (
    PhaseClock,
    StepProfile,
    check_profile_folder,
    profile_lines,
    profile_result,
    schedule,
)
from crosstune.loop.stop import StopSignal


class Events:
    def __init__(self) -> None:
        self.seen: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.seen.append(event)

    def on_step(self, metrics: StepMetrics) -> None:
        return None


class FakeProfiler:
    """Notes what it is told; no framework runs in this tier."""

    def __init__(self, session: FakeSession) -> None:
        self.session = session

    def warm_up(self) -> None:
        self.session.calls.append("warm up")

    def start(self) -> None:
        self.session.calls.append("start")

    def stop(
        self, folder: Path, *, step: int, evaluating: contextlib.AbstractContextManager[None]
    ) -> Recorded:
        self.session.calls.append(f"stop {step}")
        with evaluating:
            self.session.evaluate()
        operator = Operator(name="mm", calls=2, seconds=0.01)
        return Recorded(operators=[operator], flops=1e6, device_busy_s=0.001)

    def mark(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        return None

    def measure_limits(self) -> Limits:
        return Limits(flops_per_s=1e9, dtype="float32", bytes_per_s=1e10)


class FakeSession:
    phase = staticmethod(no_phase)

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.evaluate: Callable[[], object] = lambda: self.calls.append("evaluated")

    def profiler(self, settings: object) -> FakeProfiler:
        return FakeProfiler(self)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1, 1, 2, 6, 2), "off warm-up active last off off off warm-up active last off off off off"),
        ((0, 0, 1, 3, 0), "last off off " * 4 + "last off"),
        # A cycle longer than its distance to the next begins again at once.
        ((1, 1, 2, 1, 0), "off warm-up active last " * 3 + "off warm-up"),
    ],
)
def test_the_steps_of_a_schedule(values: tuple[int, ...], expected: str) -> None:
    names = ("wait_steps", "profiler_warmup_steps", "active_steps", "profiling_frequency", "repeat")
    config = make_config(profile=True, **dict(zip(names, values, strict=True)))
    assert [schedule(config, place) for place in range(14)] == expected.split()


def test_nested_phases_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, now = PhaseClock(), [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    with clock.step(7):
        now[0] += 1.0
        with clock.phase(DATA):
            now[0] += 2.0
            with clock.phase(FORWARD):
                now[0] += 4.0
        with clock.phase(FORWARD):
            now[0] += 8.0
    assert (clock.steps, clock.seconds) == ({7: 15.0}, {FORWARD: 12.0, DATA: 2.0})
    assert [name for name, _, _ in clock.spans] == [FORWARD, DATA, FORWARD, "step 7"]


def run_steps(
    session: FakeSession,
    folder: Path,
    observer: Events,
    num_steps: int,
    stop: StopSignal | None = None,
    **options: object,
) -> None:
    config = make_config(profile=True, **options)
    stop = stop or StopSignal()
    profile = StepProfile(session=session, config=config, folder=folder, observer=observer, stop=stop)  # type: ignore[arg-type]
    with contextlib.closing(profile):
        for step in range(1, num_steps + 1):
            with profile.step(step):
                with profile.phase(DATA), session.phase(FORWARD):
                    pass
                profile.note_step_time(0.1)


def test_a_cycle_warms_up_records_and_writes(tmp_path: Path) -> None:
    session, observer = FakeSession(), Events()
    run_steps(session, tmp_path / "p", observer, 8)
    assert session.calls == ["warm up", "start", "stop 2", "evaluated"]
    assert session.phase is no_phase
    [event] = observer.seen
    assert isinstance(event, Profiled) and event.result["steps"] == [2, 3]
    assert event.result["other_steps_s"] == 0.1
    saved = json.loads((tmp_path / "p" / "profile.json").read_text())
    assert saved["limits"]["flops_per_s"] == 1e9 and saved["operators"][0]["calls"] == 1
    assert "measured limits" in (tmp_path / "p" / "profile.txt").read_text()


def test_a_run_that_ends_within_a_cycle_is_profiled_as_far_as_it_came(tmp_path: Path) -> None:
    session, observer = FakeSession(), Events()
    run_steps(session, tmp_path, observer, 3, profile_active_steps=50)
    assert session.calls[-2:] == ["stop 2", "evaluated"]
    [event] = observer.seen
    assert isinstance(event, Profiled) and event.result["steps"] == [2, 3]


def test_a_long_cycle_is_recorded_in_parts(tmp_path: Path) -> None:
    session, observer = FakeSession(), Events()
    run_steps(session, tmp_path, observer, 30, profile_active_steps=23, profiling_frequency=1000)
    part = ["warm up", "start", "stop {}", "evaluated"]
    assert session.calls == [call.format(first) for first in (2, 12, 22) for call in part]
    [said, event] = observer.seen
    assert isinstance(said, Warned) and isinstance(event, Profiled)
    assert event.result["steps"] == list(range(2, 25))


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_stop_does_not_wait_for_the_evaluation(tmp_path: Path, when: str) -> None:
    session, observer, stop = FakeSession(), Events(), StopSignal()

    def evaluate() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        session.calls.append("evaluated")

    session.evaluate = evaluate
    if when == "before":
        stop.request("Ctrl-C")
    with stop.listening():
        run_steps(session, tmp_path, observer, 9, stop=stop, profile_active_steps=8)
    assert session.calls[-1] == "stop 2", "the profiler was ended, its events were not read"
    [said] = [event.message for event in observer.seen if isinstance(event, Warned)]
    assert "8 steps was discarded" in said


def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    observer = Events()
    run_steps(FakeSession(), tmp_path / "file" / "p", observer, 4)
    assert [type(event) for event in observer.seen] == [Warned, Warned]


@pytest.mark.parametrize("kind", ["file", "locked"])
def test_an_output_that_cannot_be_written_is_refused_at_once(kind: str) -> None:
    with reachable_folder() as folder:
        target = folder / "out"
        if kind == "file":
            target.write_text("")
        else:
            target.mkdir(mode=0o555)
        config = make_config(profile=True, profiling_output=str(target))
        with as_other_user(), pytest.raises(UserError, match="cannot be written"):
            check_profile_folder(config, folder / "demo")
        check_profile_folder(
            make_config(profiling_output=str(target)), folder / "demo"
        )  # nothing is profiled


@pytest.fixture
def clock() -> Iterator[PhaseClock]:
    found = PhaseClock(seconds={FORWARD: 0.3, BACKWARD: 0.5, "evaluation": 1.0}, cpu_s=2.0)
    found.steps = {3: 1.0, 4: 1.0}
    yield found


def test_the_shares_add_up_to_the_step(clock: PhaseClock) -> None:
    recorded = [Recorded(flops=2e9, device_busy_s=0.25), Recorded(flops=2e9, device_busy_s=0.25)]
    limits = Limits(flops_per_s=2e10, dtype="bfloat16", bytes_per_s=1e12)
    result = profile_result(clock, recorded, limits, engine="torch", other_steps_s=[])
    assert result["step_s"] == 0.5  # without the evaluation
    assert sum(phase["seconds"] for phase in result["phases"].values()) == pytest.approx(0.5)
    assert sum(phase["share"] for phase in result["phases"].values()) == pytest.approx(1.0)
    assert result["phases"]["other"]["seconds"] == pytest.approx(0.1)
    assert result["device_busy_share"] == pytest.approx(0.5)
    assert result["limit_share"] == pytest.approx(2e9 / 0.5 / 2e10)
    text = "\n".join(profile_lines(result))
    assert (
        "20 GFLOP/s in bfloat16" in text and "1 TB/s of memory" in text and "evaluation, not counted" in text
    )
