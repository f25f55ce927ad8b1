"""When a checkpoint is due, and who writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosstune.checkpoint.folders import checkpoint_folders
from crosstune.core.events import Observers
from crosstune.core.protocols import SessionState
from crosstune.core.ranks import Alone, Ranks
from crosstune.loop import save
from crosstune.loop.save import Checkpoints, SavePolicy


class OneWeight:
    """The state of a session with one trained weight."""

    def __init__(self) -> None:
        self.exports = 0

    def num_parameters(self) -> tuple[int, int]:
        return 1, 1

    def export_state(self, *, copy: bool = True, divided: bool = False) -> SessionState:
        self.exports += 1
        return SessionState(weights={"w": np.ones(1, np.float32)}, moments={}, random={})


class Second(Alone):
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
    fields = {"step": 1, "identity": {}, "progress": {}}
    return Checkpoints(
        root,
        policy=SavePolicy(**policy),
        fields=lambda step: fields | {"step": step},
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
