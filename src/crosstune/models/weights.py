"""Write safetensors files and shards using little memory, and read their tensors with numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.files.json_files import write_json
from crosstune.files.safetensors_header import make_header, read_header
from crosstune.models.staged import Progress, silent

_NUMPY = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}
_PACKED = {"U32": "<u4", "U8": "u1", "I32": "<i4", "I8": "i1"}
SHARD_BYTES = 4 * 2**30


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor to write. `rows` yields its little-endian data in order, in pieces of any size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: Iterable[NDArray[Any]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(_NUMPY[self.dtype]).itemsize


def write_safetensors(path: Path, tensors: Sequence[Tensor], *, progress: Progress = silent) -> None:
    """Write the tensors in the given order. The header is made from their shapes, so data can be streamed."""
    entries = ((tensor.name, tensor.dtype, tensor.shape, tensor.num_bytes) for tensor in tensors)
    done, total = 0, sum(tensor.num_bytes for tensor in tensors)
    with path.open("wb") as file:
        file.write(make_header(entries, format="pt"))
        for tensor in tensors:
            expected = done + tensor.num_bytes
            for rows in tensor.rows:
                done += file.write(np.ascontiguousarray(rows).data)
                progress("convert", done, total)
            assert done == expected, f"{tensor.name} came with {done - expected:+} bytes"


def write_shards(
    folder: Path,
    tensors: Iterable[tuple[str, Any]],
    *,
    save: Callable[[dict[str, Any], Path], None],
    stem: str = "model",
    on_bytes: Callable[[int], None] = lambda done: None,
) -> None:
    """Write tensors with an engine's `save`, in shards under transformers' names with an index. At most one shard is in
    memory. `on_bytes` is called with the bytes written so far."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = []
    shard: dict[str, Any] = {}
    total = shard_bytes = 0

    def close() -> None:
        nonlocal shard, shard_bytes, total
        save(shard, folder / f"part-{len(shards):05d}.safetensors")
        shards.append(list(shard))
        total += shard_bytes
        shard, shard_bytes = {}, 0
        on_bytes(total)

    for name, tensor in tensors:
        shard[name] = tensor
        shard_bytes += tensor.nbytes
        if shard_bytes >= SHARD_BYTES:
            close()
    if shard:
        close()
    if len(shards) == 1:
        (folder / "part-00000.safetensors").rename(folder / f"{stem}.safetensors")
        return
    index: dict[str, str] = {}
    for number, names in enumerate(shards):
        final = f"{stem}-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{number:05d}.safetensors").rename(folder / final)
        index |= dict.fromkeys(names, final)
    write_json(
        folder / f"{stem}.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index}
    )


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bfloat16 bits of float32 values, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    # Rounding could turn a NaN into an infinity.
    return np.where(np.isnan(values), (bits >> 16) | 0x0040, rounded).astype(np.uint16)


class StoredArray(NamedTuple):
    """A tensor in a safetensors file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """The first byte of its data in the file."""

    def map(self) -> NDArray[Any]:
        """Return the values without reading them yet. bfloat16 is returned as uint16 bits, since numpy lacks it."""
        kind = {**_NUMPY, **_PACKED}[self.dtype]
        if 0 in self.shape:  # an empty range cannot be memory-mapped
            return np.empty(self.shape, kind)
        return np.memmap(self.path, kind, "r", self.offset, self.shape or (1,)).reshape(self.shape)

    def read(self) -> tuple[str, NDArray[Any]]:
        """Return the dtype and a copy of the values; they must be floats."""
        if self.dtype not in _NUMPY:
            raise UserError(f"{self.path} contains weights of the unsupported dtype {self.dtype}.")
        return self.dtype, np.array(self.map())


def stored_arrays(path: Path) -> dict[str, StoredArray]:
    """Return every tensor of a file by name."""
    header = read_header(path)
    return {
        name: StoredArray(
            path, entry["dtype"], tuple(entry["shape"]), header.data_start + entry["data_offsets"][0]
        )
        for name, entry in header.tensors.items()
    }


def read_arrays(path: Path) -> dict[str, tuple[str, NDArray[Any]]]:
    """Return every tensor of a file with its dtype name."""
    return {name: stored.read() for name, stored in stored_arrays(path).items()}


def read_rows(path: Path, name: str, rows: NDArray[np.int64]) -> NDArray[Any]:
    """Return some rows of a tensor without reading the others; floats as fp32, packed integers unchanged."""
    stored = stored_arrays(path)[name]
    found = np.array(stored.map()[rows])
    return to_float32(stored.dtype, found) if stored.dtype in _NUMPY else found


def to_float32(dtype: str, values: NDArray[Any]) -> NDArray[np.float32]:
    """Convert an array of `read_arrays` to float32."""
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)
