"""A sharded state is one checkpoint: written by several processes, read as a whole or by rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manifests import make_manifest

from crosstune.checkpoint import shards
from crosstune.checkpoint.folders import checkpoint_folders
from crosstune.checkpoint.manifest import DamagedCheckpoint
from crosstune.checkpoint.read import open_checkpoint
from crosstune.checkpoint.shards import files_of, part_name, write_divided
from crosstune.checkpoint.write import SaveFailed
from crosstune.core.protocols import SessionState, StatePart
from crosstune.process.ranks import Group, Ranks

WHOLE = {
    "even": np.arange(24, dtype=np.float32).reshape(8, 3),
    "uneven": np.arange(15, dtype=np.float32).reshape(5, 3),
    "short": np.arange(2, dtype=np.float32),  # fewer rows than processes
    "scalar": np.array(7, dtype=np.float32),
}
TRAINABLE = {name: {"dtype": "F32", "shape": list(array.shape)} for name, array in WHOLE.items()}


class Threads(Group):
    """The processes of a run as threads."""

    def __init__(self, ranks: Ranks, barrier: threading.Barrier, said: dict[int, Any]) -> None:
        super().__init__()
        self.ranks, self._barrier, self._said = ranks, barrier, said

    def gather(self, data: bytes) -> list[bytes]:
        self._said[self.ranks.rank] = data
        self._barrier.wait(600)
        found = [self._said[rank] for rank in range(self.ranks.size)]
        self._barrier.wait(600)
        return found


def part_state(number: int, count: int) -> SessionState:
    def rows(array: np.ndarray) -> np.ndarray:
        chunk = -(-len(array) // count)
        return array[number * chunk : (number + 1) * chunk]

    weights = {n: a if a.ndim == 0 else rows(a) for n, a in WHOLE.items() if a.ndim or number == 0}
    moments = {"first_moment": {name: array * 2 for name, array in weights.items()}}
    if number == 0:
        moments["step"] = {name: np.array(3.0, dtype=np.float32) for name in WHOLE}
    shapes = {name: array.shape for name, array in WHOLE.items()}
    part = StatePart(number=number, count=count, writes=True, shapes=shapes)
    return SessionState(weights=weights, moments=moments, random={"torch.cpu": np.arange(4)}, part=part)


def save_all(root: Path, count: int, before: Callable[[int], None] = lambda rank: None) -> list[Any]:
    """Write a checkpoint from so many threads; return what each returned or raised."""
    barrier, said, ended = threading.Barrier(count), dict[int, Any](), dict[int, Any]()

    def run(rank: int) -> None:
        group = Threads(Ranks(rank=rank, size=count), barrier, said)
        try:
            before(rank)
            ended[rank] = write_divided(
                root, part_state(rank, count), make_manifest(2, trainable=TRAINABLE), group=group
            )
        except SaveFailed as error:
            ended[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [ended[rank] for rank in range(count)]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_parts_are_one_state(count: int, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    committed = save_all(root, count)
    assert {one.folder for one in committed} == {root / "step-00000002"}
    checkpoint = open_checkpoint(root / "step-00000002")
    assert len(checkpoint.manifest.files) == 2 * count + 1
    state = checkpoint.load()
    for name, array in WHOLE.items():
        np.testing.assert_array_equal(np.asarray(state.weights[name]), array)
        np.testing.assert_array_equal(np.asarray(state.moments["first_moment"][name]), array * 2)
        assert state.weights[name].shape == array.shape and state.moments["step"][name] == 3
    for start, stop in ((0, 8), (1, 4), (3, 8), (5, 5)):
        np.testing.assert_array_equal(state.weights["even"][start:stop], WHOLE["even"][start:stop])
    assert not list(root.glob(".*"))


def test_a_failure_in_one_process_fails_in_all_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = shards.write_tensors

    def fail(path: Path, arrays: Mapping[str, Any]) -> dict[str, Any]:
        if path.name == part_name("moments.safetensors", 1, 3):
            raise OSError(28, "No space left on device")
        return plain(path, arrays)

    monkeypatch.setattr(shards, "write_tensors", fail)
    ended = save_all(tmp_path / "checkpoints", 3)
    assert all(isinstance(error, SaveFailed) for error in ended)
    assert "disk is full" in ended[1].why and "another process" in ended[0].why
    assert checkpoint_folders(tmp_path / "checkpoints") == []
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_missing_or_changed_part_is_found(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    save_all(root, 2)
    part = root / "step-00000002" / part_name("weights.safetensors", 1, 2)
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="have changed"):
        open_checkpoint(root / "step-00000002")
    part.unlink()
    with pytest.raises(DamagedCheckpoint, match="weights-00002-of-00002"):
        open_checkpoint(root / "step-00000002")


def test_parts_are_complete_or_not_there() -> None:
    two = [part_name("weights.safetensors", number, 2) for number in range(2)]
    assert files_of("weights.safetensors", two) == two
    assert files_of("weights.safetensors", ["weights.safetensors", *two]) == ["weights.safetensors"]
    assert files_of("weights.safetensors", two[:1]) == []
    assert files_of("weights.safetensors", [*two, part_name("weights.safetensors", 0, 3)]) == []
