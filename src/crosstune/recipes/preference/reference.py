"""Store the reference's log probabilities of all answers in the run, with hashes of the data and the model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.checkpoint.tensors import read_tensors, write_tensors
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.protocols import Array
from crosstune.files.atomic_files import staged_file
from crosstune.files.plain_files import file_sha256
from crosstune.models.adapter_files import PEFT_WEIGHTS

_HASH, _MADE = ".identity", "made"
_LONGEST = 1000
"""Characters of a hash or a description in the file."""


def model_identity(config: Config, base: Mapping[str, Any]) -> str:
    """Return a hash of the weights that are the reference: the base and the adapter to start from."""
    parts = [str(base.get("base", {}).get("identity")), str(base.get("quantization"))]
    if config.base_adapter:
        parts.append(file_sha256(Path(config.base_adapter).expanduser() / PEFT_WEIGHTS))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def write_reference(
    path: Path, found: Mapping[str, Array], identities: Mapping[str, str], *, made: str
) -> None:
    """Write the log probabilities with hashes: of the data, the model, the values, and the way they were computed."""
    arrays: dict[str, Array] = {_MADE: _letters(made)}
    for name, values in found.items():
        arrays[name] = np.ascontiguousarray(values, np.float32)
        arrays[name + _HASH] = _letters(f"{identities[name]} {_sha(arrays[name])}")
    with staged_file(path) as staged:
        write_tensors(staged, arrays)


def read_reference(
    path: Path, identities: Mapping[str, str], rows: Mapping[str, int], *, made: str | None, columns: int = 2
) -> dict[str, Array] | None:
    """Return the stored log probabilities, nan where they are not computed yet. None if there are none, or none of this data, this
    model and, unless `made` is None, this computation. Raise if the file is damaged."""
    if not os.path.lexists(path):
        return None
    arrays = read_tensors(path)
    texts = {name: _text(arrays.get(name)) for name in (_MADE, *(part + _HASH for part in identities))}
    if made is not None and texts[_MADE] != made:
        return None
    found: dict[str, Array] = {}
    for name, identity in identities.items():
        hashed, values = texts[name + _HASH], arrays.get(name)
        if not hashed.startswith(identity):
            return None
        if values is None or values.dtype != np.float32 or values.shape != (rows[name], columns):
            raise _damaged(path, f"{name!r} is not an array of {rows[name]} x {columns} float32 numbers.")
        # Files of the first version have no hash of the numbers.
        if hashed not in (identity, f"{identity} {_sha(values)}") or np.isinf(values).any():
            raise _damaged(path, f"the numbers of {name!r} do not match their hash.")
        found[name] = values
    return found


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path} is damaged.", why=why, do="delete it: its numbers are then computed again")


def _sha(values: Array) -> str:
    return hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()


def _letters(text: str) -> Array:
    return np.frombuffer(text.encode(), np.uint8)


def _text(array: Array | None) -> str:
    if array is None or array.dtype != np.uint8 or array.size > _LONGEST:
        return ""
    return array.tobytes().decode(errors="replace")
