"""Store the reference's log probabilities of all answers in the run, with hashes of the data and the model."""

from __future__ import annotations

import hashlib
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

REFERENCE = "reference.safetensors"
"""In the run folder: a row for each preference, by split."""
_HASH = ".identity"


def model_identity(config: Config, base: Mapping[str, Any]) -> str:
    """Return a hash of the weights that are the reference: the base and the adapter to start from."""
    parts = [str(base.get("base", {}).get("identity")), str(base.get("quantization"))]
    if config.base_adapter:
        parts.append(file_sha256(Path(config.base_adapter).expanduser() / PEFT_WEIGHTS))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def write_reference(path: Path, found: Mapping[str, Array], identities: Mapping[str, str]) -> None:
    arrays: dict[str, Array] = {
        name: np.ascontiguousarray(array, np.float32) for name, array in found.items()
    }
    for name, identity in identities.items():
        arrays[name + _HASH] = np.frombuffer(identity.encode(), np.uint8)
    with staged_file(path) as staged:
        write_tensors(staged, arrays)


def read_reference(path: Path, identities: Mapping[str, str]) -> dict[str, Array] | None:
    """Return the stored log probabilities; None if there are none. Raise if they belong to other data or another model."""
    if not path.is_file():
        return None
    arrays = read_tensors(path)
    for name, identity in identities.items():
        hashed = arrays.get(name + _HASH)
        if hashed is None or bytes(np.asarray(hashed, np.uint8)).decode(errors="replace") != identity:
            raise UserError(
                f"{path} does not belong to this run.",
                why=f"its {name.replace('_', '-')} rows, or the model they were computed with, are different.",
                do="restore the data and the model of the run, or delete the file to compute it again",
            )
    return {name: np.asarray(arrays[name], np.float32) for name in identities}
