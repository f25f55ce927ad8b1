"""A safetensors header is believed only where it describes its file exactly."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosstune.core.errors import UserError
from crosstune.core.safetensors_header import HEADER_LIMIT, BadSafetensors, read_header
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
    "empty": (b"", "not a JSON object"),
    "not JSON": (b"{", "not JSON"),
    "not UTF-8": (b'{"\xff": 1}', "not JSON"),
    "UTF-16": ("{}".encode("utf-16-le"), "not JSON"),
    "nested too deep": (b'{"a":' * 50_000, "not JSON"),
    "a list": (b"[]", "not a JSON object"),
    "space before it": (b' {"a": {}}', "not a JSON object"),
    "a tensor twice": (b'{"a": %b, "a": %b}' % ((json.dumps(tensor()).encode(),) * 2), "occurs twice"),
    "a key twice": (b'{"a": {"dtype": "F32", "dtype": "F32"}}', "occurs twice"),
    "metadata twice": (b'{"__metadata__": {}, "__metadata__": {}}', "occurs twice"),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "a": tensor()}, "__metadata__"),
    "metadata of no words": ({"__metadata__": [], "a": tensor()}, "__metadata__"),
    "an entry that is a number": ({"a": 1}, "without dtype"),
    "no dtype": ({"a": without("dtype")}, "without dtype"),
    "no shape": ({"a": without("shape")}, "without dtype"),
    "no offsets": ({"a": without("data_offsets")}, "without dtype"),
    "unknown dtype": ({"a": tensor(dtype="F33")}, "unknown dtype"),
    "dtype that is a list": ({"a": tensor(dtype=["F32"])}, "unknown dtype"),
    "shape that is a number": ({"a": tensor(shape=2)}, "the shape 2"),
    "negative shape": ({"a": tensor(shape=[-1, -2])}, "the shape"),
    "fraction in a shape": ({"a": tensor(shape=[2.0])}, "the shape"),
    "truth in a shape": ({"a": tensor(shape=[True, 2])}, "the shape"),
    "one offset": ({"a": tensor(data_offsets=[8])}, "places 'a'"),
    "three offsets": ({"a": tensor(data_offsets=[0, 8, 8])}, "places 'a'"),
    "negative offset": ({"a": tensor(data_offsets=[-8, 0])}, "places 'a'"),
    "reversed offsets": ({"a": tensor(data_offsets=[8, 0])}, "places 'a'"),
    "fraction in an offset": ({"a": tensor(data_offsets=[0.0, 8.0])}, "places 'a'"),
    "size that is not the shape's": ({"a": tensor(shape=[3])}, "8 bytes for F32 of shape [3]"),
    "half a byte": ({"a": tensor(dtype="F4", shape=[17])}, "8 bytes for F4"),
    "overlap": ({"a": tensor(), "b": tensor()}, "overlap before 'b'"),
    "gap at the beginning": ({"a": tensor(shape=[1], data_offsets=[4, 8])}, "gap"),
    "gap between": (
        {"a": tensor(dtype="U8", data_offsets=[0, 2]), "b": tensor(shape=[1], data_offsets=[4, 8])},
        "gap or an overlap before 'b'",
    ),
    "end beyond the file": ({"a": tensor(shape=[4], data_offsets=[0, 16])}, "its header declares"),
    "more data than described": ({"a": tensor(shape=[1], data_offsets=[0, 4])}, "its header declares"),
    "nothing described": ({}, "its header declares"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_header_is_refused_by_the_name_of_its_file(tmp_path: Path, name: str) -> None:
    header, words = BAD[name]
    path = write(tmp_path / "x.safetensors", header)
    with pytest.raises(BadSafetensors) as caught:
        read_header(path)
    assert str(path) in caught.value.asked
    assert words in caught.value.why


@pytest.mark.parametrize(
    "raw", [b"", b"1234567", struct.pack("<Q", 3) + b"{}", struct.pack("<Q", 2**63) + b"{}"]
)
def test_a_header_longer_than_its_file_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    with pytest.raises(BadSafetensors, match="in a file of"):
        read_header(path)


def test_a_header_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", HEADER_LIMIT + 1) + b"{")
    with path.open("r+b") as file:
        file.truncate(2 * HEADER_LIMIT)  # takes no room
    with pytest.raises(BadSafetensors, match="in a file of"):
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


def test_types_of_less_than_a_byte(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"a": tensor(dtype="F4", shape=[4, 4])})
    assert read_header(path).tensors["a"]["shape"] == [4, 4]


def test_a_file_without_tensors(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"__metadata__": {"format": "pt"}}, num_bytes=0)
    assert read_header(path).tensors == {}
    assert read_arrays(path) == {}


def test_every_reader_refuses(tmp_path: Path, tiny_model: Path) -> None:
    """Model folders, arrays for numpy and tensors for torch are read through the same check."""
    from crosstune.torch_engine.stream import find_tensors

    bad = write(tmp_path / "model.safetensors", {"a": tensor(), "b": tensor()})
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    for read in (lambda: check_folder(tmp_path), lambda: read_arrays(bad), lambda: find_tensors(tmp_path)):
        with pytest.raises(BadSafetensors, match="overlap"):
            read()
    write(bad, {"a": tensor(dtype="C64", shape=[1])})
    with pytest.raises(UserError, match="C64"):
        find_tensors(tmp_path)
