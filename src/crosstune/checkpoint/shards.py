"""Sharded checkpoints: each process writes a part, and the parts are joined when read."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.checkpoint.folders import name_of
from crosstune.checkpoint.manifest import MOMENTS, RANDOM, WEIGHTS, Manifest
from crosstune.checkpoint.tensors import file_bytes, write_tensors
from crosstune.checkpoint.write import (
    Committed,
    SaveFailed,
    check_finite,
    check_room,
    committed,
    failed,
    no_memory,
    state_files,
    write_manifest,
)
from crosstune.core.protocols import Array, SessionState
from crosstune.files.atomic_files import put_new, staging_folder
from crosstune.files.json_files import read_json, write_json
from crosstune.process.ranks import Group

_PART = re.compile(r"(?P<stem>[a-z]+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")

Described = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype and shape of an array."""


def write_divided(root: Path, state: SessionState, manifest: Manifest, *, group: Group) -> Committed:
    """Write `root/step-NNNNNNNN`, each process its part, and point `latest` at it.

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
        staged = Path(group.broadcast(str(staged)))
        with _together(group, target, need):
            if state.part.writes:
                _write_part(staged, state)
        with _together(group, target, need):
            if group.ranks.first:
                files = _take_listed(staged, state.part.count)
                files[RANDOM] = write_tensors(staged / RANDOM, parts[RANDOM])
                write_manifest(staged, replace(manifest, files=files))
                put_new(staged, target)
    return committed(root, target, need) if group.ranks.first else Committed(folder=target, num_bytes=need)


def _listed(number: int) -> str:
    return f"part-{number:05d}.json"


def _write_part(staged: Path, state: SessionState) -> None:
    """Write the arrays of this process, and list their files for rank 0."""
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
        # A process may have no rows of an array; rank 0 has some of each, unless the array is empty.
        arrays = {key: array for key, array in parts[file].items() if array.size or number == 0}
        name = part_name(file, number, count)
        files[name] = write_tensors(staged / name, arrays)
    write_json(staged / _listed(number), files)


def _take_listed(staged: Path, count: int) -> dict[str, Any]:
    """Return the listed files of all parts, and remove the lists."""
    files: dict[str, Any] = {}
    for number in range(count):
        files |= read_json(staged / _listed(number))
        (staged / _listed(number)).unlink()
    return files


@contextlib.contextmanager
def _together(group: Group, target: Path, need: int) -> Iterator[None]:
    """Raise SaveFailed in every process if one of them fails in the `with` block."""
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


def part_name(file: str, number: int, count: int) -> str:
    """Return the name of a part file of `file`, counted from 0."""
    return f"{file.removesuffix('.safetensors')}-{number + 1:05d}-of-{count:05d}.safetensors"


def files_of(file: str, listed: Collection[str]) -> list[str]:
    """Return `file` itself or all of its parts in order; nothing if a part is missing."""
    if file in listed:
        return [file]
    matches = [match for name in listed if (match := _PART.fullmatch(name))]
    counts = {int(m["count"]) for m in matches if f"{m['stem']}.safetensors" == file}
    if len(counts) != 1:
        return []
    [count] = counts
    names = [part_name(file, number, count) for number in range(count)]
    return names if all(name in listed for name in names) else []


def describe_joined(parts: Sequence[Described]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtypes and shapes of the joined arrays."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for part in parts:
        for name, (dtype, shape) in part.items():
            if name in found and shape:
                before = found[name][1]
                shape = (before[0] + shape[0], *before[1:])
            found[name] = (dtype, shape)
    return found


def join(parts: Sequence[Mapping[str, Array]]) -> dict[str, Any]:
    """Return the whole arrays; an array with rows in several parts is joined when it is read."""
    pieces: dict[str, list[Array]] = {}
    for part in parts:
        for name, array in part.items():
            pieces.setdefault(name, []).append(array)
    return {name: found[0] if len(found) == 1 else JoinedRows(found) for name, found in pieces.items()}


@dataclass(frozen=True)
class JoinedRows:
    """An array concatenated from row ranges when read, so that a rank reads only its own rows."""

    pieces: Sequence[Array]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(len(piece) for piece in self.pieces), *self.pieces[0].shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.pieces[0].dtype

    @property
    def ndim(self) -> int:
        return self.pieces[0].ndim

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Array:
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            return np.asarray(np.asarray(self)[rows])
        start, stop, _ = rows.indices(len(self))
        found, first = [], 0
        for piece in self.pieces:
            found.append(piece[max(start - first, 0) : max(stop - first, 0)])
            first += len(piece)
        return np.concatenate(found)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.concatenate(list(self.pieces)).astype(dtype or self.dtype, copy=False)
