"""Safetensors files: written tensor by tensor so that a large one needs little memory, and their headers read."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.core.errors import UserError
from crosstune.models.progress import Progress, silent

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
_NUMPY = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}
_PACKED = {"U32": "<u4", "U8": "u1", "I32": "<i4", "I8": "i1"}
_ALIGNMENT = 8
_MOST_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor to be written. `rows` yields its little-endian contents in order, in pieces of any size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: Iterable[NDArray[Any]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def write_safetensors(path: Path, tensors: Sequence[Tensor], *, progress: Progress = silent) -> None:
    """Write the tensors in the order given. The header comes from their shapes, so no tensor is held in memory."""
    import numpy as np

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    done = 0
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor in tensors:
            expected = done + tensor.num_bytes
            for rows in tensor.rows:
                done += file.write(np.ascontiguousarray(rows).data)
                progress("convert", done, offset)
            assert done == expected, f"{tensor.name} came with {done - expected:+} bytes"


def read_header(path: Path) -> tuple[dict[str, Any], bytes]:
    """The tensors a file declares, and the raw header. A file cut short or not safetensors is an error."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= min(size - 8, _MOST_HEADER_BYTES):
            raise _damaged(path, "it does not begin with a safetensors header")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in header.values()]
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise _damaged(path, f"its header cannot be read ({error})") from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise _damaged(path, f"it has {size:,} bytes and its header declares {expected:,}")
    return header, prefix + raw


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of float32 values, rounded to nearest, ties to even."""
    import numpy as np

    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    # Rounding could carry a NaN's payload away and leave an infinity.
    return np.where(np.isnan(values), (bits >> 16) | 0x0040, rounded).astype(np.uint16)


def read_arrays(path: Path) -> dict[str, tuple[str, NDArray[Any]]]:
    """Every tensor of a file with the name of its type. numpy has no bfloat16: such a one comes as its 16 bits."""
    import numpy as np

    header, raw = read_header(path)
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=len(raw)) if header else np.empty(0, np.uint8)
    found: dict[str, tuple[str, NDArray[Any]]] = {}
    for name, entry in header.items():
        if entry["dtype"] not in _NUMPY:
            raise UserError(f"{path} holds {name} as {entry['dtype']}.", why="that type is not read here.")
        start, end = entry["data_offsets"]
        values = np.array(data[start:end]).view(_NUMPY[entry["dtype"]]).reshape(entry["shape"])
        found[name] = (entry["dtype"], values)
    return found


def read_rows(path: Path, name: str, rows: NDArray[np.int64]) -> NDArray[Any]:
    """Some rows of one tensor, without the others: numbers as fp32, packed bits as they are."""
    import numpy as np

    header, raw = read_header(path)
    entry = header[name]
    kind = _NUMPY.get(entry["dtype"]) or _PACKED[entry["dtype"]]
    offset = len(raw) + entry["data_offsets"][0]
    values = np.memmap(path, dtype=kind, mode="r", offset=offset, shape=tuple(entry["shape"]) or (1,))
    found = np.array(values[rows])
    return to_float32(entry["dtype"], found) if entry["dtype"] in _NUMPY else found


def to_float32(dtype: str, values: NDArray[Any]) -> NDArray[np.float32]:
    """What `read_arrays` gave, as numbers."""
    import numpy as np

    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _damaged(path: Path, why: str) -> UserError:
    return UserError(
        f"{path} is not a whole safetensors file.", why=f"{why}.", do="download or copy the model again"
    )
