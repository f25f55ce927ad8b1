"""Read tensors from safetensors files one at a time, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from crosstune.core.errors import UserError
from crosstune.files.plain_files import open_plain
from crosstune.files.safetensors_header import read_header
from crosstune.models.folder import weight_files

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Place:
    """Where a tensor is stored."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def find_tensors(folder: Path) -> dict[str, Place]:
    """Return the place of every tensor of a model folder, reading only the file headers."""
    places = {}
    for path in weight_files(folder):
        header = read_header(path)
        for name, entry in header.tensors.items():
            if entry["dtype"] not in _DTYPES:
                raise UserError(f"{path} stores {name} as {entry['dtype']}, which torch does not support.")
            start, end = (header.data_start + offset for offset in entry["data_offsets"])
            places[name] = Place(path, _DTYPES[entry["dtype"]], tuple(entry["shape"]), start, end)
    return places


def read_tensor(place: Place) -> torch.Tensor:
    """Read a tensor. A plain read needs less memory than a map, whose pages stay resident."""
    with open_plain(place.file) as file:
        file.seek(place.start)
        buffer = bytearray(place.end - place.start)
        if file.readinto(buffer) != len(buffer):  # type: ignore[attr-defined]
            raise UserError(f"{place.file} is truncated.", do="fetch the model again")
    if not buffer:
        return torch.empty(place.shape, dtype=place.dtype)
    return torch.frombuffer(buffer, dtype=place.dtype).reshape(place.shape)


def read_slice(place: Place, number: int) -> torch.Tensor:
    """Read one entry of the first dimension."""
    size = (place.end - place.start) // place.shape[0]
    start = place.start + number * size
    return read_tensor(Place(place.file, place.dtype, place.shape[1:], start, start + size))


def read_ahead(names: Sequence[str], places: dict[str, Place], *, num_workers: int) -> Iterator[torch.Tensor]:
    """Yield tensors in the order of `names` while the next `num_workers` are read in threads."""
    with ThreadPoolExecutor(max_workers=num_workers) as pool:
        reads = (pool.submit(read_tensor, places[name]) for name in names)
        waiting = deque(islice(reads, num_workers + 1))
        while waiting:
            future = waiting.popleft()
            yield future.result()
            del future  # frees the tensor
            waiting.extend(islice(reads, 1))
