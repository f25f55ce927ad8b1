"""Choose the weights of the result: the best by evaluation, or the last."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from crosstune.checkpoint.folders import FOLDER, name_of
from crosstune.checkpoint.manifest import DamagedCheckpoint
from crosstune.checkpoint.read import Checkpoint, open_checkpoint
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.events import Observer, Warned
from crosstune.core.ranks import Group
from crosstune.loop.best import best_step, trained_losses
from crosstune.loop.progress import Progress


def best_weights(
    config: Config, progress: Progress, runs: Sequence[Path], observer: Observer, *, group: Group
) -> tuple[Checkpoint | None, int | None]:
    """Return the checkpoint for the result, None for the weights of the last step; and the best step.

    `runs` are this run and the one it continues. `auto` means best if there was more than one evaluation after the start.
    If the best checkpoint is missing, warn and use the last weights. Every process calls this, and all return the same
    checkpoint: None unless each of them can open it.
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
    found, reason = (
        _open_first([run / FOLDER / name_of(best) for run in runs]) if group.ranks.first else (None, "")
    )
    place = group.share(str(found.folder) if found is not None else "")
    if place and not group.ranks.first:
        found, reason = _open_first([Path(place)])
    step = found.step if found is not None else None
    if not group.any(found is None) and group.same(str(step)):
        return found, best
    reason = reason or "another process cannot open them"
    message = (
        f"result: the best weights, of step {best}, are not there, so the last ones are the result ({reason})"
    )
    observer.on_event(Warned(message=message, step=progress.steps))
    return None, best


def _open_first(folders: Sequence[Path]) -> tuple[Checkpoint | None, str]:
    """Return the first checkpoint that can be opened, or why the first one cannot."""
    reason = ""
    for folder in folders:
        try:
            return open_checkpoint(folder), ""
        except (DamagedCheckpoint, UserError) as error:
            reason = reason or error.message
    return None, reason
