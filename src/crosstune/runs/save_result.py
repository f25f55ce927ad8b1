"""Write the result of a run, the adapter or the model, in place of an older one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from crosstune.checkpoint.write import SaveFailed
from crosstune.core import atomic_files
from crosstune.core.disk import free_space, readable_bytes
from crosstune.core.out_of_memory import OutOfMemory, memory_errors
from crosstune.core.protocols import Recipe, Session
from crosstune.models.checksums import write_checksums
from crosstune.models.folder_record import read_record

_STAGED = "result"
_FEWEST_BYTES = 2
"""Bytes of a trained weight in the smallest format that a result has."""


def save_result(session: Session, recipe: Recipe, folder: Path, *, writes: bool) -> Path | None:
    """Write the result to a staging folder and move it into place, so that an older one is replaced atomically.

    Every process calls this, since gathering the weights may need all of them; the process that `writes` returns the path.
    """
    if not writes:
        session.save_result(None)
        return None
    try:
        with (
            memory_errors(doing="writing the result"),
            _room(folder, session),
            atomic_files.staging_folder(folder / _STAGED) as staging,
        ):
            written = session.save_result(staging)
            assert written is not None
            recipe.complete_result(written)
            write_checksums(written)
            target = folder / written.name
            atomic_files.put_in_place(written, target, aside=staging / "old")
    except OutOfMemory as error:
        raise SaveFailed(error.message, why=error.why, do="free memory, and continue the run") from error
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise SaveFailed(
            f"The result could not be written to {folder}.",
            why=f"the system reported: {reason or error}{_free(folder)}.",
            do="free space or repair the disk, and continue the run",
        ) from error
    return target


@contextlib.contextmanager
def _room(folder: Path, session: Session) -> Iterator[None]:
    """Raise before anything is written if the disk has no room for the trained weights."""
    need, free = _FEWEST_BYTES * session.num_parameters()[0], free_space(folder)
    if free < need:
        raise SaveFailed(
            f"There is not enough disk space for the result in {folder}.",
            why=f"it takes at least {readable_bytes(need)} and {readable_bytes(free)} are free.",
            do="free some space, and continue the run",
        )
    yield


def _free(folder: Path) -> str:
    try:
        return f"; {readable_bytes(free_space(folder))} are free"
    except OSError:  # the disk is gone
        return ""


def clear_leftovers(folder: Path) -> None:
    """Remove results that killed processes left unfinished."""
    atomic_files.clear_leftovers(folder, of=_STAGED.__eq__)


def cost_of_saving(result: Path) -> dict[str, Any] | None:
    """Return the distance of the saved model from the trained one, if they differ."""
    return read_record(result).get("against_trained") or None
