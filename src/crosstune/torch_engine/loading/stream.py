"""Read weights from safetensors files one tensor at a time to bound memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from crosstune.core.errors import UserError
from crosstune.files.plain_files import open_plain
from crosstune.files.safetensors_header import read_header

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
    """The location of a tensor in a file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def find_tensors(folder: Path) -> dict[str, Place]:
    """Return the place of every tensor of a model folder, reading only the file headers."""
    places: dict[str, Place] = {}
    for file in sorted(folder.glob("*.safetensors")):
        places |= places_in(file)
    return places


def places_in(path: Path) -> dict[str, Place]:
    """Return places for plain reads; the pages of a memory map would stay resident while the file is open."""
    header = read_header(path)
    places = {}
    for name, entry in header.tensors.items():
        if entry["dtype"] not in _DTYPES:
            raise UserError(
                f"{path} holds {name} as {entry['dtype']}.", why="torch does not support that dtype."
            )
        start, end = (header.data_start + offset for offset in entry["data_offsets"])
        places[name] = Place(path, _DTYPES[entry["dtype"]], tuple(entry["shape"]), start, end)
    return places


def read_tensor(place: Place) -> torch.Tensor:
    with open_plain(place.file) as file:
        file.seek(place.start)
        buffer = bytearray(place.end - place.start)
        if file.readinto(buffer) != len(buffer):  # type: ignore[attr-defined]
            raise UserError(f"{place.file} is truncated.", do="fetch the model again")
    if not buffer:
        return torch.empty(place.shape, dtype=place.dtype)
    return torch.frombuffer(buffer, dtype=place.dtype).reshape(place.shape)


def read_ahead(
    names: Sequence[str], places: dict[str, Place], *, num_workers: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors in the order of `names` while the next `num_workers` are read in threads."""
    with ThreadPoolExecutor(max_workers=num_workers) as pool:
        waiting: list[tuple[str, Future[torch.Tensor]]] = []
        for name in names:
            waiting.append((name, pool.submit(read_tensor, places[name])))
            if len(waiting) > num_workers:
                done, future = waiting.pop(0)
                yield done, future.result()
                del future
        while waiting:
            done, future = waiting.pop(0)
            yield done, future.result()
            del future
