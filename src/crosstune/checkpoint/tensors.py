"""Write arrays to a safetensors file with its hash, and read them back after checking the header."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from crosstune.core.protocols import Array, SessionState
from crosstune.files.plain_files import open_plain
from crosstune.files.safetensors_header import BadSafetensors, Header, make_header, read_header_of

CHUNK_BYTES = 4 * 2**20
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
"""The dtypes in a checkpoint, by their safetensors names."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_tensors(path: Path, arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Write a new file and hash it meanwhile; return its entry in `Manifest.files`. The caller syncs it to disk."""
    sha = hashlib.sha256()
    with ThreadPoolExecutor(max_workers=1) as pool:

        def hashed() -> Iterator[Any]:
            for chunk in _chunks(arrays):
                update = pool.submit(sha.update, chunk)
                yield chunk
                update.result()

        num_bytes = write_new(path, hashed())
    return {"bytes": num_bytes, "sha256": sha.hexdigest()}


def write_new(path: Path, chunks: Iterable[Any]) -> int:
    """Write a new file that only its owner may read, and return its size in bytes."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    num_bytes = 0
    try:
        for chunk in chunks:
            view = memoryview(chunk)
            num_bytes += len(view)
            while view:
                view = view[os.write(handle, view) :]
    finally:
        os.close(handle)
    return num_bytes


def file_bytes(arrays: Mapping[str, Array]) -> int:
    """Return the size of the file that `write_tensors` writes for these arrays."""
    return len(_header(arrays)) + sum(array.nbytes for array in arrays.values())


def read_tensors(path: Path, *, mapped: bool = False) -> dict[str, Array]:
    """Return all arrays of a file: copies, or `mapped` into memory."""
    arrays: dict[str, Array] = {}
    with open_plain(path, follow_links=False) as file:
        header = _read_header(file, path)
        for name, entry in header.tensors.items():
            dtype, (begin, end) = DTYPES[entry["dtype"]], entry["data_offsets"]
            if mapped and end > begin:  # an empty array cannot be mapped
                arrays[name] = np.memmap(
                    file, dtype=dtype, mode="r", offset=header.data_start + begin, shape=tuple(entry["shape"])
                )
                continue
            file.seek(header.data_start + begin)
            array = np.fromfile(file, dtype=dtype, count=(end - begin) // dtype.itemsize)
            if array.nbytes != end - begin:
                raise BadSafetensors(path, f"it ends within {name!r}")
            arrays[name] = array.reshape(entry["shape"])
    return arrays


def describe_tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype and shape of every array, from the header alone."""
    with open_plain(path, follow_links=False) as file:
        header = _read_header(file, path)
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.tensors.items()}


def dtype_name(array: Array) -> str:
    """Return the safetensors name of an array's dtype."""
    return _NAMES[array.dtype.newbyteorder("<")]


def describe_trainable(state: SessionState) -> dict[str, Any]:
    """Return name -> dtype and shape of each trained array, for `Manifest.trainable`."""
    if state.part is not None:  # sharded weights are in fp32
        return {name: {"dtype": "F32", "shape": list(shape)} for name, shape in state.part.shapes.items()}
    return {
        name: {"dtype": dtype_name(array), "shape": list(array.shape)}
        for name, array in state.weights.items()
    }


def _read_header(file: BinaryIO, path: Path) -> Header:
    header = read_header_of(file, path=path)
    for name, entry in header.tensors.items():
        if entry["dtype"] not in DTYPES:
            raise BadSafetensors(path, f"{name!r} is {entry['dtype']}, a dtype that checkpoints do not use")
    return header


def _chunks(arrays: Mapping[str, Array]) -> Iterator[Any]:
    yield _header(arrays)
    for _, array in _ordered(arrays):
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, len(flat), CHUNK_BYTES):
            yield flat[start : start + CHUNK_BYTES].data


def _ordered(arrays: Mapping[str, Array]) -> list[tuple[str, Array]]:
    """Return the arrays with wide dtypes first, so that each starts at a multiple of its item size."""
    return sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))


def _header(arrays: Mapping[str, Array]) -> bytes:
    ordered = _ordered(arrays)
    return make_header((name, dtype_name(array), array.shape, array.nbytes) for name, array in ordered)
