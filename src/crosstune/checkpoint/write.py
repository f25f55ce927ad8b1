"""Write a checkpoint atomically: stage it, hash it, sync it, then rename it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from crosstune.checkpoint.folders import name_of, point_latest
from crosstune.checkpoint.manifest import MANIFEST, MOMENTS, RANDOM, SEAL, WEIGHTS, Manifest, encode, seal
from crosstune.checkpoint.tensors import file_bytes, write_new, write_tensors
from crosstune.core.errors import UserError
from crosstune.core.out_of_memory import OutOfMemory
from crosstune.core.protocols import Array, SessionState
from crosstune.files.atomic_files import put_new, staging_folder
from crosstune.files.plain_files import NO_ROOM, free_space, readable_bytes, resume_advice

SPARE_BYTES = 4 * 2**20
"""Disk space to leave for the manifest and the logs of the run."""


class SaveFailed(UserError):
    """A checkpoint or result could not be written. Older checkpoints are unchanged."""


@dataclass(frozen=True, kw_only=True)
class Committed:
    folder: Path
    num_bytes: int
    latest_error: str = ""
    """Why `latest` could not be updated; the checkpoint itself is valid."""


def write_checkpoint(root: Path, state: SessionState, manifest: Manifest) -> Committed:
    """Write `root/step-NNNNNNNN` and point `latest` at it. This fills in the manifest's `files`."""
    target = root / name_of(manifest.step)
    check_finite(state)
    parts = state_files(state)
    need = sum(file_bytes(arrays) for arrays in parts.values())
    try:
        # No parents: when the disk is gone, do not create the path elsewhere.
        root.mkdir(mode=0o700, exist_ok=True)
        check_room(root, need)
        with staging_folder(target) as staged:
            files = {name: write_tensors(staged / name, arrays) for name, arrays in parts.items()}
            write_manifest(staged, replace(manifest, files=files))
            put_new(staged, target)
    except OSError as error:
        raise failed(target, need, error) from error
    return committed(root, target, need)


def committed(root: Path, target: Path, num_bytes: int) -> Committed:
    """Point `latest` at a complete checkpoint."""
    try:
        point_latest(root, target)
    except OSError as error:
        return Committed(folder=target, num_bytes=num_bytes, latest_error=str(error))
    return Committed(folder=target, num_bytes=num_bytes)


def state_files(state: SessionState) -> dict[str, dict[str, Array]]:
    """Return the arrays of each file. A moment is named `slot/canonical name of the weight`."""
    moments = {f"{slot}/{name}": a for slot, arrays in state.moments.items() for name, a in arrays.items()}
    return {WEIGHTS: dict(state.weights), MOMENTS: moments, RANDOM: dict(state.random)}


def write_manifest(staged: Path, manifest: Manifest) -> None:
    raw = encode(manifest)
    write_new(staged / MANIFEST, [raw])
    write_new(staged / SEAL, [seal(raw)])


def check_finite(state: SessionState) -> None:
    """Raise SaveFailed if a weight is not finite: training cannot continue from it."""
    for name, array in state.weights.items():
        if not np.isfinite(array).all():
            raise SaveFailed(
                f"No checkpoint was written: {name} has non-finite values.",
                why="training cannot continue from such weights; the older checkpoints are intact.",
                do="continue from one of them with a lower --lr, or in --precision fp32 or bf16",
            )


def check_room(folder: Path, need: int, *, spare: int = SPARE_BYTES) -> None:
    free = free_space(folder)
    if free < need + spare:
        reserve = f", and {readable_bytes(spare)} for the records of the run" if spare else ""
        raise SaveFailed(
            f"There is not enough disk space in {folder}.",
            why=f"{readable_bytes(need)} are needed{reserve}, but only {readable_bytes(free)} are free; "
            "older checkpoints are intact.",
            do="free some space or lower --keep_last_n, then run it again with --resume auto",
        )


def failed(target: Path, need: int, error: Exception) -> SaveFailed:
    """Return the error for a checkpoint or result that could not be written."""
    why = f"{getattr(error, 'strerror', None) or error}"
    if getattr(error, "errno", None) in NO_ROOM:
        free = readable_bytes(free_space(target.parent))
        why = f"the disk is full or a limit was reached ({why}); it needs {readable_bytes(need)}, {free} are free"
    return SaveFailed(
        f"{target} could not be written.",
        why=f"{why}. No partial files were left behind, and older checkpoints are intact.",
        do=resume_advice(error),
    )


def no_memory(error: BaseException) -> SaveFailed:
    return SaveFailed(
        "There is not enough memory to save the run.",
        why=f"{error.why if isinstance(error, OutOfMemory) else error or 'an allocation failed'}; "
        "older checkpoints are intact.",
        do="free memory (a smaller --batch_size, other programs), then continue with --resume auto",
    )
