"""Choose the weights of the result, and write it (adapter or model) atomically."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError

from crosstune.checkpoint.folders import FOLDER, name_of
from crosstune.checkpoint.manifest import DamagedCheckpoint
from crosstune.checkpoint.read import Checkpoint, open_checkpoint
from crosstune.checkpoint.write import check_room, failed, no_memory
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.events import Observer, Warned
from crosstune.core.out_of_memory import OutOfMemory, memory_errors
from crosstune.core.protocols import Recipe, Session
from crosstune.files import atomic_files
from crosstune.loop.progress import Progress, best_step, trained_losses
from crosstune.models.file_hashes import write_checksums
from crosstune.process.ranks import Group

_STAGED = "result"
_MIN_BYTES = 2
"""Bytes per trained weight in the smallest result format."""


def save_result(session: Session, recipe: Recipe, folder: Path, *, writes: bool) -> Path | None:
    """Write the result to a staging folder and replace an older result atomically; return its path.

    Every rank calls this, since gathering the weights may need all of them, but only one `writes`.
    """
    if not writes:
        session.save_result(None)
        return None
    need = _MIN_BYTES * session.num_parameters()[0]
    try:
        check_room(folder, need, spare=0)  # the result is worth more than the records
        with (
            memory_errors(doing="writing the result"),
            atomic_files.staging_folder(folder / _STAGED) as staging,
        ):
            written = session.save_result(staging)
            assert written is not None
            recipe.complete_result(written)
            write_checksums(written)
            target = folder / written.name
            atomic_files.put_in_place(written, target, aside=staging / "old")
    except OutOfMemory as error:
        raise no_memory(error) from error
    except (OSError, SafetensorError) as error:
        raise failed(folder / _STAGED, need, error) from error
    return target


def clear_leftovers(folder: Path) -> None:
    """Remove incomplete results left by killed processes."""
    atomic_files.clear_leftovers(folder, of=_STAGED.__eq__)


def find_bad_weight(session: Session) -> str | None:
    """Return the name of a trained array with non-finite values."""
    weights = session.export_state(copy=False).weights
    return next((name for name, array in weights.items() if not np.isfinite(array).all()), None)


def best_weights(
    config: Config, progress: Progress, runs: Sequence[Path], observer: Observer, *, group: Group
) -> tuple[Checkpoint | None, int | None]:
    """Return the checkpoint of the result, or None for the last weights, and the best step. Every rank calls this.

    `runs` are this run and the one it continues. `auto` means best if there was more than one evaluation after the start.
    """
    losses, best = trained_losses(progress.evaluations), best_step(progress.evaluations)
    wanted = config.result == "best" or (config.result == "auto" and len(losses) > 1)
    if group.any(not wanted or best is None or best == progress.steps) or best is None:
        if config.result == "best" and best is None:
            evaluated = any(step > 0 for step in progress.evaluations)
            why = "no evaluation had a finite loss" if evaluated else "no step was evaluated"
            message = f"result: {why}, so the last weights are the result"
            observer.on_event(Warned(message=message, step=progress.steps))
        return None, best
    folders = [run / FOLDER / name_of(best) for run in runs] if group.ranks.first else []
    found, reason = _open_first(folders)
    place = group.broadcast(str(found.folder) if found is not None else "")
    if place and not group.ranks.first:
        found, reason = _open_first([Path(place)])
    if not group.any(found is None):
        return found, best
    why = reason or "a different rank cannot open them"
    message = (
        f"result: the best weights (step {best}) are missing, so the last weights are the result ({why})"
    )
    observer.on_event(Warned(message=message, step=progress.steps))
    return None, best


def _open_first(folders: Sequence[Path]) -> tuple[Checkpoint | None, str]:
    """Return the first checkpoint that can be opened, or None and the reason the first folder could not be opened."""
    reason = ""
    for folder in folders:
        try:
            return open_checkpoint(folder), ""
        except (DamagedCheckpoint, UserError) as error:
            reason = reason or error.message
    return None, reason
