"""The times at which a checkpoint is due, and the process that writes it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manifests import make_manifest

from crosstune.checkpoint.folders import checkpoint_folders
from crosstune.checkpoint.shards import write_divided
from crosstune.checkpoint.write import SaveFailed
from crosstune.core.events import Observers
from crosstune.core.protocols import SessionState, StatePart
from crosstune.loop import save
from crosstune.loop.save import Checkpoints, SavePolicy
from crosstune.process.ranks import Ranks, SingleProcess, sum_exactly


class OneWeight:
    """The state of a session with one trained weight."""

    def __init__(self) -> None:
        self.exports = 0

    def num_parameters(self) -> tuple[int, int]:
        return 1, 1

    def export_state(self, *, copy: bool = True, divided: bool = False) -> SessionState:
        self.exports += 1
        return SessionState(weights={"w": np.ones(1, np.float32)}, moments={}, random={})


class Second(SingleProcess):
    """A process that is not the first."""

    ranks = Ranks(rank=1, size=2)


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(save, "time", clock)
    return clock


def open_checkpoints(root: Path, *, writes: bool, **policy: Any) -> Checkpoints:
    return Checkpoints(
        root,
        policy=SavePolicy(**policy),
        manifest=make_manifest,
        observer=Observers(),
        group=None if writes else Second(),
    )


@pytest.mark.parametrize("writes", [True, False])
def test_every_rank_is_due_at_the_same_step(tmp_path: Path, clock: Clock, writes: bool) -> None:
    """A rank that does not write counts its time from the last save too."""
    session, checkpoints = OneWeight(), open_checkpoints(tmp_path, writes=writes, every_s=60.0)
    assert not checkpoints.due(1)
    clock.now += 59
    assert not checkpoints.due(2)
    clock.now += 1
    assert checkpoints.due(3)
    checkpoints.save(session, 3, evaluations={}, wait=True)
    assert not checkpoints.due(4)
    clock.now += 59
    assert not checkpoints.due(5)
    clock.now += 1
    assert checkpoints.due(6)


def test_every_rank_exports_and_one_writes(tmp_path: Path) -> None:
    for writes in (True, False):
        session = OneWeight()
        checkpoints = open_checkpoints(tmp_path / str(writes), writes=writes, every_steps=2)
        checkpoints.save(session, 2, evaluations={}, wait=True)
        assert session.exports == 1  # exporting a sharded model takes all of them
        assert bool(checkpoint_folders(tmp_path / str(writes))) is writes


def test_by_steps_and_never_twice(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path, writes=False, every_steps=5)
    assert [step for step in range(1, 12) if checkpoints.due(step)] == [5, 10]
    checkpoints.save(OneWeight(), 5, evaluations={})
    assert not checkpoints.due(5) and checkpoints.due(10)


def test_a_run_ends_with_a_checkpoint_where_it_keeps_any(tmp_path: Path) -> None:
    assert open_checkpoints(tmp_path, writes=False, at_end=True).due_at_end(4)
    plain = open_checkpoints(tmp_path, writes=False)
    assert not plain.due_at_end(4)
    plain.newest = tmp_path
    assert plain.due_at_end(4)
    plain.last_step = 4
    assert not plain.due_at_end(4)


def test_a_rank_that_does_not_write_knows_that_the_run_keeps_checkpoints(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path, writes=False)
    checkpoints.save(OneWeight(), 3, evaluations={}, wait=True)
    assert checkpoints.due_at_end(4)


def test_a_failed_write_is_raised_where_all_ranks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class First(Second):
        ranks = Ranks(rank=0, size=2)

    def refuse(root: Path, state: SessionState, fields: Any) -> None:
        raise SaveFailed("no room")

    monkeypatch.setattr(save, "write_checkpoint", refuse)
    checkpoints = Checkpoints(
        tmp_path, policy=SavePolicy(), manifest=make_manifest, observer=Observers(), group=First()
    )
    checkpoints.save(OneWeight(), 3, evaluations={}, wait=True)
    with pytest.raises(SaveFailed, match="no room"):
        checkpoints.deferred.check()
    checkpoints.deferred.check()


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
