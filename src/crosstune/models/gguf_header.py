"""Check the header of a GGUF file before the gguf package reads it, which trusts every count in it."""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import BinaryIO

from crosstune.core.errors import shown
from crosstune.core.plain_files import UnreadableFile, open_plain

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_STRING, _ARRAY = 8, 9
_ITEM_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_COUNT_LIMIT = 65_536
_ENTRIES_LIMIT = 4_000_000
"""The entries of all arrays; the gguf package makes an object of each."""
_STRING_LIMIT = 16 << 20
_DIMENSIONS_LIMIT = 4
_ALIGNMENT_KEY = "general.alignment"


class BadGguf(UnreadableFile):
    """The file is not a complete GGUF file, or exceeds a limit."""

    problem = "is not a complete GGUF file"


def check_header(path: Path) -> None:
    """Raise BadGguf unless every string, array and tensor of the file lies within it and has a sensible size."""
    with open_plain(path) as file:
        try:
            _Walk(file, path).run()
        except struct.error as error:
            raise BadGguf(path, "it ends within its header") from error
        except UnicodeDecodeError as error:
            raise BadGguf(path, "a name or text in its header is not UTF-8") from error


class _Walk:
    """One pass over the header, with the number of array entries seen so far."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path = file, path
        self.size = os.fstat(file.fileno()).st_size
        self.entries, self.alignment = 0, 32

    def run(self) -> None:
        if self.file.read(4) != _MAGIC:
            raise BadGguf(self.path, "it does not begin with GGUF")
        (version,) = self.read("I")
        if version not in _VERSIONS:
            raise BadGguf(self.path, f"it has version {version}; versions 2 and 3 are read")
        num_tensors, num_keys = self.read("QQ")
        if max(num_tensors, num_keys) > _COUNT_LIMIT:
            raise BadGguf(self.path, f"it declares {num_tensors:,} tensors and {num_keys:,} keys")
        for _ in range(num_keys):
            self.skip_key()
        extents = [self.read_tensor() for _ in range(num_tensors)]
        self.check_extents(extents)

    def read(self, form: str) -> tuple[int, ...]:
        form = f"<{form}"
        return struct.unpack(form, self.file.read(struct.calcsize(form)))

    def text(self, what: str) -> str:
        (length,) = self.read("Q")
        if length > min(_STRING_LIMIT, self.left()):
            raise BadGguf(self.path, f"{what} is declared with {length:,} bytes")
        return self.file.read(length).decode("utf-8")

    def left(self) -> int:
        return self.size - self.file.tell()

    def skip_key(self) -> None:
        key = self.text("a key")
        (kind,) = self.read("I")
        if kind == _STRING:
            self.text(shown(key))
        elif kind == _ARRAY:
            self.skip_array(key)
        elif kind in _ITEM_BYTES:
            value = self.file.read(_ITEM_BYTES[kind])
            if key == _ALIGNMENT_KEY:
                self.alignment = int.from_bytes(value, "little")
        else:
            raise BadGguf(self.path, f"{shown(key)} has the unknown type {kind}")

    def skip_array(self, key: str) -> None:
        kind, count = self.read("IQ")
        smallest = 8 if kind == _STRING else _ITEM_BYTES.get(kind)
        if smallest is None:
            raise BadGguf(self.path, f"{shown(key)} is an array of the type {kind}, which is not read")
        self.entries += count
        if count * smallest > self.left() or self.entries > _ENTRIES_LIMIT:
            raise BadGguf(self.path, f"{shown(key)} is declared with {count:,} entries")
        if kind != _STRING:
            self.file.seek(count * smallest, os.SEEK_CUR)
            return
        for _ in range(count):
            self.text(f"an entry of {shown(key)}")

    def read_tensor(self) -> tuple[int, int, str]:
        """Return the begin and end of a tensor's data, from the start of all data, and its name."""
        from gguf import GGML_QUANT_SIZES

        name = self.text("the name of a tensor")
        (num_dimensions,) = self.read("I")
        if not 1 <= num_dimensions <= _DIMENSIONS_LIMIT:
            raise BadGguf(self.path, f"the tensor {shown(name)} has {num_dimensions:,} dimensions")
        shape = self.read(f"{num_dimensions}Q")
        kind, begin = self.read("IQ")
        sizes = {int(known): size for known, size in GGML_QUANT_SIZES.items()}
        if kind not in sizes:
            raise BadGguf(self.path, f"the tensor {shown(name)} has the unknown type {kind}")
        block, block_bytes = sizes[kind]
        if 0 in shape or shape[0] % block:
            raise BadGguf(self.path, f"the tensor {shown(name)} has the shape {list(shape)}")
        return begin, begin + math.prod(shape) // block * block_bytes, name

    def check_extents(self, extents: list[tuple[int, int, str]]) -> None:
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise BadGguf(self.path, f"its alignment is {self.alignment}")
        start = -(-self.file.tell() // self.alignment) * self.alignment
        expected = 0
        for begin, end, name in sorted(extents):
            if begin < expected or begin % self.alignment:
                raise BadGguf(self.path, f"the tensor {shown(name)} overlaps another, or is not aligned")
            if start + end > self.size:
                raise BadGguf(self.path, f"the tensor {shown(name)} ends beyond the file")
            expected = end
