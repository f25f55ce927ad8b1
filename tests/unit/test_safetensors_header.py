"""A safetensors header is accepted only if it describes its file exactly."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosstune.files.safetensors_header import BadSafetensors, read_header
from crosstune.models.folder import check_folder
from crosstune.models.weights import read_arrays


def write(path: Path, header: Any, *, num_bytes: int = 8) -> Path:
    """Write a file with a header, given as bytes or as an object, and as many bytes of data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(num_bytes))
    return path


def tensor(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in tensor().items() if name != key}


BAD: dict[str, tuple[Any, str]] = {
    "empty": (b"", "EOF"),
    "not JSON": (b"{", "EOF"),
    "not UTF-8": (b'{"\xff": 1}', "UTF-8"),
    "nested too deep": (b'{"a":' * 50_000, "JSON"),
    "a list": (b"[]", "JSON"),
    "a tensor twice": (b'{"a": %b, "a": %b}' % ((json.dumps(tensor()).encode(),) * 2), "occurs twice"),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "a": tensor()}, "expected a string"),
    "no shape": ({"a": without("shape")}, "missing field `shape`"),
    "unknown dtype": ({"a": tensor(dtype="F33")}, "unknown variant"),
    "negative shape": ({"a": tensor(shape=[-1, -2])}, "expected usize"),
    "shape that overflows": ({"a": tensor(shape=[2**60, 2**60])}, "overflow"),
    "reversed offsets": ({"a": tensor(data_offsets=[8, 0])}, "offset"),
    "size that is not the shape's": ({"a": tensor(shape=[3])}, "invalid shape"),
    "overlap": ({"a": tensor(), "b": tensor()}, "invalid offset"),
    "gap": ({"a": tensor(shape=[1], data_offsets=[4, 8])}, "invalid offset"),
    "end beyond the file": ({"a": tensor(shape=[4], data_offsets=[0, 16])}, "not fully covered"),
    "more data than described": ({"a": tensor(shape=[1], data_offsets=[0, 4])}, "not fully covered"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_header_is_refused_by_the_name_of_its_file(tmp_path: Path, name: str) -> None:
    header, words = BAD[name]
    path = write(tmp_path / "x.safetensors", header)
    with pytest.raises(BadSafetensors) as caught:
        read_header(path)
    assert str(path) in caught.value.message
    assert words in caught.value.why
    assert caught.value.short() == f"x.safetensors: {caught.value.why}"


@pytest.mark.parametrize(
    "raw", [b"", b"1234567", struct.pack("<Q", 3) + b"{}", struct.pack("<Q", 2**63) + b"{}"]
)
def test_a_header_longer_than_its_file_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    with pytest.raises(BadSafetensors, match=f"the file has {len(raw)} bytes"):
        read_header(path)


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    arrays = {
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
        "bytes": np.arange(3, dtype=np.uint8),
        "none": np.zeros((0, 4), np.float16),
        "scalar": np.asarray(7, np.int64),
    }
    path = tmp_path / "x.safetensors"
    save_file(arrays, path, metadata={"format": "np"})
    header = read_header(path)
    raw = path.read_bytes()
    assert header.raw == raw[: header.data_start]
    for name, array in arrays.items():
        begin, end = header.tensors[name]["data_offsets"]
        assert header.tensors[name]["shape"] == list(array.shape)
        assert raw[header.data_start + begin : header.data_start + end] == array.tobytes()


def test_a_file_without_tensors(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"__metadata__": {"format": "pt"}}, num_bytes=0)
    assert read_header(path).tensors == {}
    assert read_arrays(path) == {}


def test_every_reader_refuses(tmp_path: Path, tiny_model: Path) -> None:
    """Model folders and arrays for numpy are read through the same check."""
    bad = write(tmp_path / "model.safetensors", {"a": tensor(), "b": tensor()})
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    for read in (lambda: check_folder(tmp_path), lambda: read_arrays(bad)):
        with pytest.raises(BadSafetensors, match="invalid offset"):
            read()
