"""Arrays in one safetensors file: written in a stream and hashed meanwhile, read only after its header was checked."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.core.protocols import Array
from crosstune.core.record import unique_keys

CHUNK_BYTES = 4 * 2**20
HEADER_LIMIT = 100 * 2**20
"""The format's own limit on its header, checked before a byte of it is read."""
# The format's word -> numpy's type. Others do not occur in a checkpoint.
DTYPES: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_WORDS = {dtype: word for word, dtype in DTYPES.items()}


class BadTensors(ValueError):
    """A file is not a safetensors file that we would have written."""


@dataclass(frozen=True, kw_only=True)
class Written:
    num_bytes: int
    sha256: str


def write_tensors(path: Path, arrays: Mapping[str, Array]) -> Written:
    """A new file, on disk when this returns. Hashing runs beside the writing."""
    hasher = _Hasher()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    size = 0
    try:
        with hasher:
            for chunk in _chunks(arrays):
                hasher.add(chunk)
                write_all(handle, chunk)
                size += len(chunk)
        os.fsync(handle)
    finally:
        os.close(handle)
    return Written(num_bytes=size, sha256=hasher.digest())


def file_bytes(arrays: Mapping[str, Array]) -> int:
    """The size of the file that `write_tensors` makes of them."""
    return len(_header(arrays)) + sum(array.nbytes for array in arrays.values())


def read_tensors(path: Path) -> dict[str, Array]:
    """Every array of a file, each a copy of its own. The header is believed only where it fits the file."""
    with path.open("rb") as file:
        entries, start = _read_header(file, path)
        arrays = {}
        for name, (dtype, shape, begin, end) in entries.items():
            file.seek(start + begin)
            array = np.fromfile(file, dtype=dtype, count=(end - begin) // dtype.itemsize)
            if array.nbytes != end - begin:
                raise BadTensors(f"{path.name} ends within {name}")
            arrays[name] = array.reshape(shape)
        return arrays


def describe_tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (type, shape), from the header alone."""
    with path.open("rb") as file:
        entries, _ = _read_header(file, path)
    return {name: (_WORDS[dtype], shape) for name, (dtype, shape, _, _) in entries.items()}


def word_of(array: Array) -> str:
    """The format's word for the type of an array."""
    return _WORDS[array.dtype.newbyteorder("<")]


def write_all(handle: int, data: Any) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


class _Hasher:
    """sha256 in a thread of its own: the hash and the write of a chunk run at the same time."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()
        self._chunks: queue.Queue[Any] = queue.Queue(maxsize=4)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Hasher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._chunks.put(None)
        self._thread.join()

    def add(self, chunk: Any) -> None:
        self._chunks.put(chunk)

    def digest(self) -> str:
        return self._sha.hexdigest()

    def _run(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            self._sha.update(chunk)


def _chunks(arrays: Mapping[str, Array]) -> Iterator[Any]:
    yield _header(arrays)
    for _, array in _ordered(arrays):
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, len(flat), CHUNK_BYTES):
            yield flat[start : start + CHUNK_BYTES].data


def _ordered(arrays: Mapping[str, Array]) -> list[tuple[str, Array]]:
    """Wide types first, so that every array starts at a multiple of its own size."""
    return sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))


def _header(arrays: Mapping[str, Array]) -> bytes:
    entries: dict[str, Any] = {}
    offset = 0
    for name, array in _ordered(arrays):
        end = offset + array.nbytes
        entries[name] = {
            "dtype": word_of(array),
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


Entry = tuple[np.dtype[Any], tuple[int, ...], int, int]


def _read_header(file: Any, path: Path) -> tuple[dict[str, Entry], int]:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, HEADER_LIMIT):
        raise BadTensors(f"{path.name} has a header of {length} bytes in a file of {size}")
    try:
        described = json.loads(file.read(length), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise BadTensors(f"the header of {path.name} is not JSON: {error}") from error
    if not isinstance(described, dict):
        raise BadTensors(f"the header of {path.name} is not an object")
    described.pop("__metadata__", None)
    entries = {name: _entry(name, facts, path) for name, facts in described.items()}
    _check_layout(entries, data_bytes=size - 8 - length, path=path)
    return entries, 8 + length


def _entry(name: str, facts: Any, path: Path) -> Entry:
    try:
        dtype = DTYPES[facts["dtype"]]
        shape = tuple(_count(n) for n in facts["shape"])
        begin, end = (_count(n) for n in facts["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadTensors(f"{path.name} describes {name!r} in a way that cannot be read: {error}") from error
    if end - begin != _product(shape) * dtype.itemsize:
        raise BadTensors(f"{path.name} gives {name!r} {end - begin} bytes for a shape of {shape}")
    return dtype, shape, begin, end


def _check_layout(entries: Mapping[str, Entry], *, data_bytes: int, path: Path) -> None:
    """Arrays lie one after the other and fill the file, so nothing is read twice and nothing is hidden."""
    expected = 0
    for name, (_, _, begin, end) in sorted(entries.items(), key=lambda item: (item[1][2], item[1][3])):
        if begin != expected:
            raise BadTensors(f"{path.name} leaves a gap or an overlap before {name!r}")
        expected = end
    if expected != data_bytes:
        raise BadTensors(f"{path.name} describes {expected} of {data_bytes} bytes")


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
