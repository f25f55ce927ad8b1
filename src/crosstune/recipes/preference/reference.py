"""Store the reference's log probabilities of all answers in the run, with hashes of the data and the model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.checkpoint.tensors import read_tensors, write_tensors
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.events import Evaluating, Observer, Warned
from crosstune.core.protocols import Array
from crosstune.data.batches.row_order import rows_per_evaluation
from crosstune.files.atomic_files import staged_file
from crosstune.files.plain_files import file_sha256
from crosstune.files.run_record import REFERENCE
from crosstune.models.adapter_files import PEFT_WEIGHTS
from crosstune.recipes.sft import TokenRecipe, reporting

_HASH, _MADE = ".identity", "made"
_LONGEST = 1000
"""Characters of a hash or a description in the file."""
_BATCHES_PER_SAVE, _MAX_SAVES = 16, 20
"""Minimum number of batches between two saves, and maximum number of saves."""


def model_identity(config: Config, base: Mapping[str, Any]) -> str:
    """Return a hash of the weights that are the reference: the base and the adapter to start from."""
    parts = [str(base.get("base", {}).get("identity")), str(base.get("quantization"))]
    if config.base_adapter:
        parts.append(file_sha256(Path(config.base_adapter).expanduser() / PEFT_WEIGHTS))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def complete_reference(
    recipe: TokenRecipe,
    *,
    folder: Path,
    earlier: Path | None,
    identities: Mapping[str, str],
    starts: Mapping[str, NDArray[np.int64]],
    columns: int,
    made: str,
    compute: Callable[[Iterable[Any]], Iterable[Array]],
    role: str,
    writes: bool,
    observer: Observer,
) -> dict[str, Array]:
    """Return the log probabilities of all examples: read them from the run, compute the missing ones, and store them.

    `starts`: for `train` and `held_out`, the first stored row of each example, then the number of rows. `compute` returns the
    values of each batch. `role`: reference or teacher.
    """
    size = rows_per_evaluation(recipe.config)
    path = (earlier or folder) / REFERENCE
    rows = {name: int(places[-1]) for name, places in starts.items()}
    # A continued run keeps its values on every backend.
    stored = read_reference(path, identities, rows, made=None if earlier else made, columns=columns)
    if stored is None:
        if earlier is not None and path.exists():
            message = f"{path} does not match the data, the model or the options: it is computed again"
            observer.on_event(Warned(message=message))
        stored = {name: np.full((count, columns), np.nan, np.float32) for name, count in rows.items()}

    def stored_at(name: str, examples: range) -> Array:
        return stored[name][starts[name][examples.start] : starts[name][examples.stop]]

    places = [
        (name, range(first, min(first + size, len(starts[name]) - 1)))
        for name in starts
        for first in range(0, len(starts[name]) - 1, size)
    ]
    missing = [place for place in places if np.isnan(stored_at(*place)).any()]
    several = max(_BATCHES_PER_SAVE, -(-len(missing) // _MAX_SAVES))
    for first in range(0, len(missing), several):
        chunk = missing[first : first + several]
        batches = (recipe.batch(getattr(recipe, name), [[at] for at in examples]) for name, examples in chunk)
        shown = reporting(batches, len(missing), observer, done=first, stage=role)
        for (name, examples), values in zip(chunk, compute(shown), strict=True):
            if not np.isfinite(values).all():
                raise UserError(
                    f"The {role}'s log probabilities of the {name.replace('_', '-')} rows {examples.start + 1} to {examples.stop} "
                    "are not finite.",
                    why="the model overflows in this precision, or has weights that are not finite.",
                    do="use --precision fp32 or bf16, or a different model",
                )
            stored_at(name, examples)[:] = values
        if writes:
            _write(folder / REFERENCE, stored, identities, made=made)
    if missing:
        done = len(missing)
        observer.on_event(Evaluating(done=done, total=done, what="batches", stage=role))
    if writes and not (folder / REFERENCE).exists():
        _write(folder / REFERENCE, stored, identities, made=made)
    return stored


def _write(path: Path, found: Mapping[str, Array], identities: Mapping[str, str], *, made: str) -> None:
    """Write the log probabilities with hashes of the data, the model and the values, and with a description of the
    computation."""
    arrays: dict[str, Array] = {_MADE: _letters(made)}
    for name, values in found.items():
        arrays[name] = np.ascontiguousarray(values, np.float32)
        arrays[name + _HASH] = _letters(f"{identities[name]} {_sha(arrays[name])}")
    with staged_file(path) as staged:
        write_tensors(staged, arrays)


def read_reference(
    path: Path, identities: Mapping[str, str], rows: Mapping[str, int], *, made: str | None, columns: int = 2
) -> dict[str, Array] | None:
    """Return the stored log probabilities; missing ones are nan. Return None if there is no file, or if it is from different
    data, a different model or, unless `made` is None, a different computation. Raise if it is damaged."""
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
