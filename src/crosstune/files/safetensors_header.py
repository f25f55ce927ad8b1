"""Make the header of a safetensors file, and read one after the safetensors library has validated it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypedDict

from safetensors import SafetensorError, safe_open

from crosstune.files.json_files import parse_json
from crosstune.files.plain_files import UnreadableFile, open_plain

_PREFIX_BYTES = 8


class BadSafetensors(UnreadableFile):
    """The file is not a complete and unambiguous safetensors file."""

    problem = "is not a complete safetensors file"

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(path, why, do="download, copy or write the file again")


class TensorEntry(TypedDict):
    """The header entry of one tensor, with the keys of the format."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]
    """Begin and end, counted from `Header.data_start`."""


class Header(NamedTuple):
    tensors: dict[str, TensorEntry]
    raw: bytes
    """The bytes before the data: the length prefix and the JSON."""

    @property
    def data_start(self) -> int:
        return len(self.raw)


def make_header(arrays: Iterable[tuple[str, str, Sequence[int], int]], **metadata: str) -> bytes:
    """Return the bytes before the data, from the name, dtype, shape and size in bytes of each array in order."""
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, dtype, shape, num_bytes in arrays:
        end = offset + num_bytes
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _PREFIX_BYTES)
    return len(text).to_bytes(_PREFIX_BYTES, "little") + text


def read_header(path: Path) -> Header:
    """Return the header of a file; raise BadSafetensors unless its tensors fill the file without gaps or overlaps."""
    with open_plain(path) as file:
        return read_header_of(file, path=path)


def read_header_of(file: BinaryIO, *, path: Path) -> Header:
    """Return the header of a file that is open at its start."""
    try:
        # The library limits the header to 100 MB, and checks dtypes, shapes, offsets and the size of the file.
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        size = os.fstat(file.fileno()).st_size
        raise BadSafetensors(path, f"{error}; the file has {size:,} bytes") from error
    prefix = file.read(_PREFIX_BYTES)
    raw = file.read(int.from_bytes(prefix, "little"))
    try:
        described: dict[str, Any] = parse_json(raw)
    except ValueError as error:  # a name that occurs twice
        raise BadSafetensors(path, f"its header is not JSON: {error}") from error
    described.pop("__metadata__", None)
    tensors = {
        name: TensorEntry(
            dtype=entry["dtype"], shape=entry["shape"], data_offsets=list(entry["data_offsets"])
        )
        for name, entry in described.items()
    }
    return Header(tensors=tensors, raw=prefix + raw)
