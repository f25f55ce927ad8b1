"""Name the part files of a state that several processes wrote, and join the rows in them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crosstune.core.protocols import Array

_PART = re.compile(r"(?P<stem>[a-z]+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")

Described = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype and shape of an array."""


def part_name(file: str, number: int, count: int) -> str:
    """Return the name of a part, counted from 0, of `file`."""
    return f"{file.removesuffix('.safetensors')}-{number + 1:05d}-of-{count:05d}.safetensors"


def files_of(file: str, listed: Collection[str]) -> list[str]:
    """Return the files that hold the arrays of `file` in order: itself, or all of its parts. Empty if one is missing."""
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
    """Return the arrays that the rows of the parts make together."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for part in parts:
        for name, (dtype, shape) in part.items():
            if name in found and shape:
                before = found[name][1]
                shape = (before[0] + shape[0], *before[1:])
            found[name] = (dtype, shape)
    return found


def join(parts: Sequence[Mapping[str, Array]]) -> dict[str, Any]:
    """Return the whole arrays. One with rows in several parts stays in pieces until it is read."""
    pieces: dict[str, list[Array]] = {}
    for part in parts:
        for name, array in part.items():
            pieces.setdefault(name, []).append(array)
    return {name: found[0] if len(found) == 1 else JoinedRows(found) for name, found in pieces.items()}


@dataclass(frozen=True)
class JoinedRows:
    """An array whose rows are in several arrays. A process of a sharded model reads only its own rows."""

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

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

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
