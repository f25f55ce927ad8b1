"""Write a checkpoint from several processes, each of which holds a part of the state, behind one manifest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from crosstune.checkpoint.folders import name_of
from crosstune.checkpoint.manifest import MOMENTS, RANDOM, WEIGHTS, Manifest
from crosstune.checkpoint.shard_files import part_name
from crosstune.checkpoint.tensors import file_bytes
from crosstune.checkpoint.write import (
    Committed,
    SaveFailed,
    check_finite,
    check_room,
    committed,
    failed,
    no_memory,
    state_files,
    write_listed,
    write_manifest,
)
from crosstune.core.protocols import SessionState
from crosstune.files.atomic_files import put_new, staging_folder
from crosstune.files.json_files import read_json, write_json
from crosstune.process.ranks import Group


def write_divided(root: Path, state: SessionState, manifest: Manifest, *, group: Group) -> Committed:
    """Write `root/step-NNNNNNNN`, to which every process writes its part, and point `latest` at it.

    Every process calls this; all raise SaveFailed if one of them cannot write.
    """
    assert state.part is not None
    target = root / name_of(manifest.step)
    parts = state_files(state)
    need = sum(file_bytes(arrays) for arrays in parts.values()) * state.part.count
    with contextlib.ExitStack() as stack:
        staged = Path()
        with _together(group, target, need):
            check_finite(state)
            if group.ranks.first:
                root.mkdir(mode=0o700, exist_ok=True)
                check_room(root, need)
                staged = stack.enter_context(staging_folder(target))
        staged = Path(group.share(str(staged)))
        with _together(group, target, need):
            if state.part.writes:
                _write_part(staged, state)
        with _together(group, target, need):
            if group.ranks.first:
                files = _take_listed(staged, state.part.count)
                files[RANDOM] = write_listed(staged / RANDOM, parts[RANDOM])
                write_manifest(staged, replace(manifest, files=files))
                put_new(staged, target)
    return committed(root, target, need) if group.ranks.first else Committed(folder=target, num_bytes=need)


def _listed(number: int) -> str:
    return f"part-{number:05d}.json"


def _write_part(staged: Path, state: SessionState) -> None:
    """Write the arrays of this process, and a note of their files for the first one."""
    assert state.part is not None
    if not staged.is_dir():
        raise SaveFailed(
            f"A process of the run does not see {staged}.",
            why="every process writes its part of a large checkpoint into the folder of the run.",
            do="use an --output_dir on a file system that all hosts share",
        )
    number, count, parts = state.part.number, state.part.count, state_files(state)
    files = {}
    for file in (WEIGHTS, MOMENTS):
        # A process may have no rows of an array; the first has some of each, unless the array is empty.
        arrays = {key: array for key, array in parts[file].items() if array.size or number == 0}
        name = part_name(file, number, count)
        files[name] = write_listed(staged / name, arrays)
    write_json(staged / _listed(number), files)


def _take_listed(staged: Path, count: int) -> dict[str, Any]:
    """Return the files of all parts, and remove the notes of them."""
    files: dict[str, Any] = {}
    for number in range(count):
        path = staged / _listed(number)
        if not path.is_file():
            raise SaveFailed(
                f"Part {number + 1} of {count} of the checkpoint is not in {staged}.",
                why="the process that wrote it has another folder under this name.",
                do="use an --output_dir on a file system that all hosts share",
            )
        files |= read_json(path)
        path.unlink()
    return files


@contextlib.contextmanager
def _together(group: Group, target: Path, need: int) -> Iterator[None]:
    """Raise SaveFailed in every process if the block fails in one."""
    problem: SaveFailed | None = None
    try:
        yield
    except SaveFailed as error:
        problem = error
    except OSError as error:
        problem = failed(target, need, error)
    except MemoryError as error:
        problem = no_memory(error)
    if group.any(problem is not None):
        raise problem or SaveFailed(
            f"The checkpoint {target} could not be written.",
            why="another process could not write its part; the older checkpoints are intact.",
            do="read the message of that process",
        )
