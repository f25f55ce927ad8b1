"""The steps at which a checkpoint is due, and the events of a checkpoint written in the background."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manifests import make_manifest

from crosstune.checkpoint import write as writing
from crosstune.checkpoint.read import open_checkpoint
from crosstune.checkpoint.rotate import Keep
from crosstune.checkpoint.shards import write_divided
from crosstune.checkpoint.write import SaveFailed
from crosstune.core.events import CheckpointFailed, CheckpointSaved, Event, Warned
from crosstune.core.protocols import SessionState, StatePart
from crosstune.loop import save as saving
from crosstune.loop.save import Checkpoints, SavePolicy
from crosstune.process.ranks import Ranks, SingleProcess, sum_exactly


@dataclass
class Heard:
    events: list[Event] = field(default_factory=list)

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@dataclass
class OneWeight:
    """A session with one weight, which says whether its state was copied."""

    value: float = 1.0
    trained: int = 4
    copies: list[bool] = field(default_factory=list)

    def num_parameters(self) -> tuple[int, int]:
        return self.trained, 10 * self.trained

    def export_state(self, *, copy: bool = True, divided: bool = False) -> SessionState:
        self.copies.append(copy)
        weights = {"a.weight": np.full((2, 2), self.value, np.float32)}
        return SessionState(weights=weights, moments={}, random={})


class Second(SingleProcess):
    """A process that is not the first."""

    ranks = Ranks(rank=1, size=2)


def make(root: Path, **policy: Any) -> tuple[Checkpoints, Heard]:
    group = policy.pop("group", None)
    heard = Heard()
    made = Checkpoints(root, policy=SavePolicy(**policy), manifest=make_manifest, observer=heard, group=group)
    assert made.longest_save_s == 0.0 and made.last_step == 0
    return made, heard


def save(made: Checkpoints, step: int, session: Any = None, **options: Any) -> None:
    made.save(session if session is not None else OneWeight(), step, evaluations={}, **options)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test moves."""
    now = [100.0]
    monkeypatch.setattr(saving.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds every write of a checkpoint until it is set."""
    opened, plain = threading.Event(), saving.write_checkpoint

    def held(*args: Any) -> Any:
        opened.wait()
        return plain(*args)

    monkeypatch.setattr(saving, "write_checkpoint", held)
    return opened


def test_due_by_steps(tmp_path: Path) -> None:
    made, _ = make(tmp_path, every_steps=3)
    assert [step for step in range(10) if made.due(step)] == [3, 6, 9]
    save(made, 3, wait=True)
    assert not made.due(3) and not made.due(4) and made.due(6)
    each, _ = make(tmp_path, every_steps=1)
    assert [step for step in range(3) if each.due(step)] == [1, 2]
    never, _ = make(tmp_path)
    assert not any(never.due(step) for step in range(10))


def test_due_by_time(tmp_path: Path, clock: list[float]) -> None:
    made, _ = make(tmp_path, every_s=5.0)
    clock[0] += 4.5
    assert not made.due(1)
    clock[0] += 0.5
    assert made.due(1)
    save(made, 1, wait=True)
    assert not made.due(1) and not made.due(2)
    clock[0] += 5.0
    assert not made.due(1) and made.due(2)
    never, _ = make(tmp_path)
    often, _ = make(tmp_path, every_s=0.5)
    clock[0] += 0.5
    assert often.due(1) and not never.due(1)


def test_a_run_that_has_checkpoints_ends_with_one(tmp_path: Path) -> None:
    made, _ = make(tmp_path)
    assert not made.due_at_end(5)
    save(made, 3, wait=True)
    assert made.due_at_end(5) and not made.due_at_end(3)
    asked, _ = make(tmp_path, at_end=True)
    assert asked.due_at_end(1) and not asked.due_at_end(0)


@pytest.mark.parametrize("wait", [True, False])
def test_a_checkpoint_is_written_and_told(tmp_path: Path, wait: bool) -> None:
    made, heard = make(tmp_path)
    session = OneWeight(value=3.0)
    save(made, 7, session, wait=wait)
    assert session.copies == [not wait]
    made.finish()
    [event] = heard.of(CheckpointSaved)
    assert made.newest is not None and event.path == str(made.newest) and event.step == 7
    found = open_checkpoint(made.newest)
    assert found.step == 7
    assert found.manifest.trainable == {"a.weight": {"dtype": "F32", "shape": [2, 2]}}
    np.testing.assert_array_equal(found.load().weights["a.weight"], np.full((2, 2), 3.0, np.float32))
    assert event.bytes > 0 and event.blocked_s > 0 and 0 < event.seconds == made.longest_save_s
    assert heard.of(Warned) == []
    made.finish()
    made.poll()
    assert len(heard.events) == 1


def test_writing_goes_on_beside_the_loop(tmp_path: Path, gate: threading.Event) -> None:
    made, heard = make(tmp_path)
    save(made, 1)  # would not return if it waited
    made.poll()
    assert heard.events == [] and made.newest is None and made.last_step == 1
    gate.set()
    while not heard.events:
        made.poll()
        time.sleep(0.001)
    assert made.newest is not None and heard.of(CheckpointSaved)[0].step == 1


def test_the_time_that_training_waits_is_less_than_that_of_the_write(
    tmp_path: Path, gate: threading.Event
) -> None:
    made, heard = make(tmp_path)
    save(made, 1)
    gate.set()
    made.finish()
    [beside] = heard.of(CheckpointSaved)
    assert beside.blocked_s < beside.seconds
    save(made, 2, wait=True)
    waited = heard.of(CheckpointSaved)[1]
    assert waited.blocked_s >= waited.seconds
    assert made.longest_save_s == max(beside.seconds, waited.seconds)


def test_a_save_waits_for_the_one_before_it(tmp_path: Path, gate: threading.Event) -> None:
    made, heard = make(tmp_path)
    save(made, 1)
    gate.set()
    save(made, 2)
    assert [event.step for event in heard.of(CheckpointSaved)] == [1]
    made.finish()
    assert [event.step for event in heard.of(CheckpointSaved)] == [1, 2]


def test_a_state_that_would_fill_the_memory_is_written_while_training_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 bytes a trained parameter, in a quarter of what is free."""

    class Free:
        available = 4 * 12 * 1000

    monkeypatch.setattr(saving.psutil, "virtual_memory", Free)
    made, heard = make(tmp_path)
    for step, (trained, copied) in enumerate([(1000, True), (1001, False)], start=1):
        session = OneWeight(trained=trained)
        save(made, step, session)
        assert session.copies == [copied]
        assert len(heard.of(CheckpointSaved)) == (0 if copied else 2)


def test_a_process_that_does_not_write_still_takes_part(tmp_path: Path) -> None:
    made, heard = make(tmp_path, every_steps=2, group=Second())
    session = OneWeight()
    save(made, 2, session)
    made.poll()
    made.finish()
    assert session.copies == [False] and made.last_step == 2 and not made.due(2)
    assert heard.events == [] and list(tmp_path.iterdir()) == []


def test_old_checkpoints_go_and_the_best_one_stays(tmp_path: Path) -> None:
    made, heard = make(tmp_path, keep=Keep(last_n=1))
    for step, loss in ((1, 0.5), (2, 0.9), (3, 0.8)):
        made.save(OneWeight(), step, evaluations={1: 0.5, step: loss}, wait=True)  # type: ignore[arg-type]
    assert [event.removed for event in heard.of(CheckpointSaved)] == [[], [], ["step-00000002"]]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000003"]


def test_by_default_three_are_kept(tmp_path: Path) -> None:
    made, _ = make(tmp_path)
    for step in range(1, 6):
        save(made, step, wait=True)
    assert len(list(tmp_path.glob("step-*"))) == 3


def test_old_checkpoints_that_cannot_be_removed_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> Any:
        raise OSError("the disk is read-only")

    monkeypatch.setattr(saving, "rotate", refuse)
    made, heard = make(tmp_path)
    save(made, 1, wait=True)
    [warned] = heard.of(Warned)
    assert "could not be removed: the disk is read-only" in warned.message and warned.step == 1
    assert heard.of(CheckpointSaved)[0].removed == []


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("stop_on_error", [True, False, None])
def test_a_write_that_fails_is_told_and_stops_the_run_unless_it_may_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool, stop_on_error: bool | None
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "write_tensors", full)
    made, heard = make(tmp_path, **({} if stop_on_error is None else {"stop_on_error": stop_on_error}))

    def save_all() -> None:
        save(made, 1, wait=wait)
        made.finish()

    if stop_on_error is False:
        save_all()
    else:
        with pytest.raises(SaveFailed, match="step-00000001"):
            save_all()
    [failed] = heard.of(CheckpointFailed)
    assert failed.step == 1 and "step-00000001" in failed.error
    assert made.newest is None and heard.of(CheckpointSaved) == []


def test_an_error_of_our_own_is_never_swallowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(saving, "write_checkpoint", broken)
    made, heard = make(tmp_path, stop_on_error=False)
    save(made, 1)
    with pytest.raises(ZeroDivisionError):
        made.finish()
    assert heard.events == []


def test_a_rank_that_does_not_write_is_due_at_the_same_step_and_at_the_end(
    tmp_path: Path, clock: list[float]
) -> None:
    made, _ = make(tmp_path, every_s=60.0, group=Second())
    clock[0] += 59
    assert not made.due(2)
    clock[0] += 1
    assert made.due(3)
    save(made, 3, wait=True)
    clock[0] += 59
    assert not made.due(5) and made.due_at_end(4) and not made.due_at_end(3)
    clock[0] += 1
    assert made.due(6)


def test_a_failed_write_is_raised_where_all_ranks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class First(Second):
        ranks = Ranks(rank=0, size=2)

    def refuse(*args: Any) -> None:
        raise SaveFailed("no room")

    monkeypatch.setattr(saving, "write_checkpoint", refuse)
    made, _ = make(tmp_path, group=First())
    save(made, 3, wait=True)
    with pytest.raises(SaveFailed, match="no room"):
        made.deferred.check()
    made.deferred.check()


def test_too_little_memory_for_a_part_is_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(state: SessionState) -> None:
        raise MemoryError

    monkeypatch.setattr("crosstune.checkpoint.shards.check_finite", refuse)
    part = StatePart(number=0, count=1, writes=True, shapes={"w": (1,)})
    state = SessionState(weights={"w": np.ones(1, np.float32)}, moments={}, random={}, part=part)
    with pytest.raises(SaveFailed, match="not enough memory"):
        write_divided(tmp_path, state, make_manifest(), group=SingleProcess())


def test_infinities_of_both_signs_sum_to_nan() -> None:
    assert math.isnan(sum_exactly([math.inf, 1.0, -math.inf]))
    assert sum_exactly([math.inf, 1.0]) == math.inf and math.isnan(sum_exactly([math.nan, math.inf]))
