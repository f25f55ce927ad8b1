"""Read and validate the header of a safetensors file."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypedDict

from crosstune.core.errors import shown
from crosstune.core.json_files import parse_json
from crosstune.core.plain_files import UnreadableFile, open_plain

HEADER_LIMIT = 100_000_000
"""The format's limit on the size of a header in bytes, checked before the header is read."""
_PREFIX_BYTES = 8
_DIMENSIONS_LIMIT = 16
_METADATA = "__metadata__"
_DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}


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


def read_header(path: Path) -> Header:
    """Return the header of a file; raise BadSafetensors unless its tensors fill the file without gaps or overlaps."""
    with open_plain(path) as file:
        return read_header_of(file, path=path)


def read_header_of(file: BinaryIO, *, path: Path) -> Header:
    """Return the header of an open file, read from its start; `path` is for errors."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(_PREFIX_BYTES)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < _PREFIX_BYTES or length > min(size - _PREFIX_BYTES, HEADER_LIMIT):
        raise BadSafetensors(path, f"its header is declared as {length:,} bytes in a file of {size:,}")
    raw = file.read(length)
    described = _parse(raw, path)
    _check_metadata(described.pop(_METADATA, {}), path)
    tensors = {name: _check_entry(name, entry, path) for name, entry in described.items()}
    _check_layout(tensors, size=size, data_start=_PREFIX_BYTES + length, path=path)
    return Header(tensors=tensors, raw=prefix + raw)


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    if not raw.startswith(b"{"):
        raise BadSafetensors(path, "its header is not a JSON object")
    try:
        described: dict[str, Any] = parse_json(raw)
    except ValueError as error:
        raise BadSafetensors(path, f"its header is not JSON: {error}") from error
    return described


def _check_metadata(metadata: Any, path: Path) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadSafetensors(path, f"{_METADATA} in its header does not map strings to strings")


def _check_entry(name: str, entry: Any, path: Path) -> TensorEntry:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise BadSafetensors(path, f"its header describes {shown(name)} without dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise BadSafetensors(path, f"its header gives {shown(name)} the unknown dtype {shown(dtype)}")
    if not _are_counts(shape) or len(shape) > _DIMENSIONS_LIMIT:
        raise BadSafetensors(path, f"its header gives {shown(name)} the shape {shown(shape)}")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise BadSafetensors(path, f"its header places {shown(name)} at {shown(offsets)}")
    if (offsets[1] - offsets[0]) * 8 != math.prod(shape) * _DTYPE_BITS[dtype]:
        raise BadSafetensors(
            path,
            f"its header gives {shown(name)} {offsets[1] - offsets[0]:,} bytes for {dtype} of shape {shown(shape)}",
        )
    return TensorEntry(dtype=dtype, shape=shape, data_offsets=offsets)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_layout(tensors: Mapping[str, TensorEntry], *, size: int, data_start: int, path: Path) -> None:
    """Check that every byte of the data belongs to exactly one tensor."""
    expected = 0
    for name, entry in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin != expected:
            raise BadSafetensors(path, f"its header leaves a gap or an overlap before {shown(name)}")
        expected = end
    if data_start + expected != size:
        raise BadSafetensors(path, f"it has {size:,} bytes and its header declares {data_start + expected:,}")
