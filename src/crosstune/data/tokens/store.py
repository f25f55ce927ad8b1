"""Store the tokens of a dataset as flat arrays, in memory or on disk: written sequentially, read at random."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from crosstune.data.batches.token_batch import IntArray
from crosstune.data.read.pictures import Picture

_BLOCK_EXAMPLES = 4096

# Array -> its dtype on disk. The tokens of example i are `tokens[ends[i - 1]:ends[i]]`.
ARRAYS: Mapping[str, str] = {
    "tokens": "<i4",
    "supervised": "|b1",
    "ends": "<i8",
    "rows": "<i8",
    "hashes": "<u8",
    "prompts": "<u8",
    "num_supervised": "<i4",
    "pictures": "|u1",
    "picture_bytes": "<i8",
    "picture_ends": "<i8",
}


@dataclass(frozen=True, kw_only=True)
class FileArray:
    """An array on disk whose slices are read on access. Pages of a memory map would count as memory of the process."""

    path: Path
    kind: str

    def __getitem__(self, places: slice) -> NDArray[Any]:
        item = np.dtype(self.kind).itemsize
        return np.fromfile(
            self.path, dtype=self.kind, count=places.stop - places.start, offset=places.start * item
        )


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """The tokens of a dataset and their loss mask."""

    tokens: IntArray | FileArray
    supervised: NDArray[np.bool_] | FileArray
    ends: NDArray[np.int64]
    rows: NDArray[np.int64]
    """The index of each example's row in the source."""
    hashes: NDArray[np.uint64]
    prompts: NDArray[np.uint64]
    """Hashes of the tokens of the prompts; of all tokens if there is no prompt."""
    num_supervised: NDArray[np.int32]
    """Supervised tokens of each example, without its first token, which is never predicted."""
    pictures: NDArray[np.uint8] | FileArray
    """The pictures of all examples as JSON. Example i has `pictures[picture_bytes[i - 1]:picture_bytes[i]]`."""
    picture_bytes: NDArray[np.int64]
    picture_ends: NDArray[np.int64]
    """The place after the last token of a picture in each example; 0 if it has none."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Counts from writing: rows read, rows skipped."""
    cut_hashes: NDArray[np.uint64] | None = None
    """Hashes of the examples as cut to the context; None if none is cut."""

    @property
    def shown_hashes(self) -> NDArray[np.uint64]:
        """The hashes of the tokens that training reads."""
        return self.hashes if self.cut_hashes is None else self.cut_hashes

    def cut(self, limit: int) -> TokenStore:
        """Return the store with the hashes of at most `limit` tokens of each example."""
        hashes, starts = np.array(self.hashes), self.ends - self.lengths()
        for example in np.flatnonzero(self.lengths() > limit):
            first = int(starts[example])
            shown = _hash(self.tokens[first : first + limit], self.pictures_of(int(example)))
            hashes[example] = np.frombuffer(shown, dtype="<u8")[0]
        return replace(self, cut_hashes=hashes)

    def __len__(self) -> int:
        return len(self.ends)

    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.ends, prepend=0)

    def num_supervised_within(self, limit: int) -> NDArray[np.int64]:
        """Return the number of supervised tokens among the first `limit` of each example."""
        counts = np.array(self.num_supervised, dtype=np.int64)
        lengths = self.lengths()
        for first in range(0, len(self), _BLOCK_EXAMPLES):
            block = slice(first, first + _BLOCK_EXAMPLES)
            long = np.flatnonzero(lengths[block] > limit) + first
            if not len(long):
                continue
            begin = int(self.ends[first] - lengths[first])
            marks = np.asarray(self.supervised[begin : int(self.ends[block][-1])])
            sums = np.concatenate([[0], np.cumsum(marks)])
            starts = self.ends[long] - lengths[long] - begin
            counts[long] = sums[starts + limit] - sums[starts + 1]
        return counts

    def read(self, example: int, *, limit: int, first: int = 0) -> tuple[IntArray, NDArray[np.bool_]]:
        """Return at most `limit` tokens of an example from token `first`, and their mask."""
        start = first + (int(self.ends[example - 1]) if example else 0)
        end = min(int(self.ends[example]), start + limit)
        return np.array(self.tokens[start:end]), np.array(self.supervised[start:end])

    def pictures_of(self, example: int) -> tuple[Picture, ...]:
        """Return the pictures of an example, in order."""
        start, end = int(self.picture_bytes[example - 1]) if example else 0, int(self.picture_bytes[example])
        if start == end:
            return ()
        return tuple(Picture(**one) for one in json.loads(bytes(self.pictures[start:end])))


class JoinedStore:
    """Multiple stores, read as one."""

    def __init__(self, stores: Sequence[TokenStore | JoinedStore]) -> None:
        self.stores = tuple(stores)
        self.starts = np.cumsum([0, *map(len, self.stores)])
        self.hashes: NDArray[np.uint64] = np.concatenate([store.hashes for store in self.stores])
        self.shown_hashes: NDArray[np.uint64] = np.concatenate([store.shown_hashes for store in self.stores])
        self.prompts: NDArray[np.uint64] = np.concatenate([store.prompts for store in self.stores])
        rows_before = np.cumsum([0, *(store.facts["rows"] for store in self.stores)])
        self.rows: NDArray[np.int64] = np.concatenate(
            [store.rows + before for store, before in zip(self.stores, rows_before, strict=False)]
        )
        self.picture_ends: NDArray[np.int64] = np.concatenate([store.picture_ends for store in self.stores])
        self.facts: Mapping[str, Any] = _sum_facts([store.facts for store in self.stores])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def lengths(self) -> NDArray[np.int64]:
        return np.concatenate([store.lengths() for store in self.stores])

    def num_supervised_within(self, limit: int) -> NDArray[np.int64]:
        return np.concatenate([store.num_supervised_within(limit) for store in self.stores])

    def read(self, example: int, *, limit: int, first: int = 0) -> tuple[IntArray, NDArray[np.bool_]]:
        number = int(np.searchsorted(self.starts, example, side="right")) - 1
        return self.stores[number].read(example - int(self.starts[number]), limit=limit, first=first)

    def pictures_of(self, example: int) -> tuple[Picture, ...]:
        number = int(np.searchsorted(self.starts, example, side="right")) - 1
        return self.stores[number].pictures_of(example - int(self.starts[number]))


def _sum_facts(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of the counts, and all names in the lists."""
    return {
        name: sum(one[name] for one in facts)
        if isinstance(value, int)
        else sorted({item for one in facts for item in one[name]})
        for name, value in facts[0].items()
    }


def _hash(tokens: IntArray, pictures: Sequence[Picture] = ()) -> bytes:
    """Return a hash of tokens and of the contents of pictures."""
    contents = "".join(picture.sha256 for picture in pictures).encode()
    return hashlib.blake2b(tokens.astype("<i4", copy=False).tobytes() + contents, digest_size=8).digest()


class StoreWriter:
    """Append examples to the open files of a store."""

    def __init__(self, files: Mapping[str, BinaryIO]) -> None:
        self.files = files
        self.num_examples = 0
        self.num_tokens = 0
        self.num_picture_bytes = 0

    def append(
        self,
        tokens: IntArray,
        supervised: NDArray[np.bool_],
        *,
        row: int,
        pictures: Sequence[Picture] = (),
        picture_end: int = 0,
        prompt: IntArray | None = None,
    ) -> None:
        """Write an example; its `prompt` is given if its first token carries loss."""
        self.num_examples += 1
        self.num_tokens += len(tokens)
        self.files["tokens"].write(tokens.astype("<i4", copy=False).tobytes())
        self.files["supervised"].write(supervised.tobytes())
        self.files["ends"].write(self.num_tokens.to_bytes(8, "little"))
        self.files["rows"].write(row.to_bytes(8, "little"))
        self.files["hashes"].write(_hash(tokens, pictures))
        prompt = tokens[: int(supervised.argmax()) or None] if prompt is None else prompt
        self.files["prompts"].write(_hash(prompt, pictures))
        self.files["num_supervised"].write(int(supervised[1:].sum()).to_bytes(4, "little"))
        written = json.dumps([picture.to_json() for picture in pictures]).encode() if pictures else b""
        self.num_picture_bytes += len(written)
        self.files["pictures"].write(written)
        self.files["picture_bytes"].write(self.num_picture_bytes.to_bytes(8, "little"))
        self.files["picture_ends"].write(picture_end.to_bytes(8, "little"))


class MemoryWriter(StoreWriter):
    """Write a store in memory."""

    def __init__(self) -> None:
        self._buffers = {name: io.BytesIO() for name in ARRAYS}
        super().__init__(self._buffers)

    def to_store(self, facts: Mapping[str, Any]) -> TokenStore:
        arrays: dict[str, Any] = {
            name: np.frombuffer(buffer.getbuffer(), dtype=ARRAYS[name])
            for name, buffer in self._buffers.items()
        }
        return TokenStore(**arrays, facts=facts)


@contextmanager
def write_store(folder: Path) -> Iterator[StoreWriter]:
    """Yield a writer of a store in a folder."""
    with ExitStack() as files:
        yield StoreWriter({name: files.enter_context((folder / f"{name}.bin").open("wb")) for name in ARRAYS})


def store_sizes(folder: Path) -> dict[str, int]:
    """Return the file size of each array of a store in a folder."""
    return {name: (folder / f"{name}.bin").stat().st_size for name in ARRAYS}


def open_store(folder: Path, facts: Mapping[str, Any]) -> TokenStore:
    """Open a store on disk. Tokens and masks are read on access; the per-example arrays are memory-mapped."""
    arrays: dict[str, Any] = {
        name: FileArray(path=folder / f"{name}.bin", kind=kind)
        if name in ("tokens", "supervised", "pictures")
        else np.memmap(folder / f"{name}.bin", dtype=kind, mode="r")
        for name, kind in ARRAYS.items()
    }
    return TokenStore(**arrays, facts=facts)
