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
from crosstune.loop.best import best_step, trained_losses
from crosstune.loop.progress import Progress


def best_weights(
    config: Config, progress: Progress, runs: Sequence[Path], observer: Observer
) -> tuple[Checkpoint | None, int | None]:
    """Return the checkpoint to make the result from, None for the weights of the last step; and the best step. It is
    looked for in `runs`: this one, and the one that it continues.

    `auto` takes the best weights if there was more than one evaluation after the start. Weights that are no longer
    there are replaced by the last ones, with a warning.
    """
    losses, best = trained_losses(progress.evaluations), best_step(progress.evaluations)
    wanted = config.result == "best" or (config.result == "auto" and len(losses) > 1)
    if not wanted or best is None or best == progress.steps:
        if config.result == "best" and best is None:
            evaluated = any(step > 0 for step in progress.evaluations)
            why = "no evaluation had a finite loss" if evaluated else "no step was evaluated"
            message = f"result: {why}, so the last weights are the result"
            observer.on_event(Warned(message=message, step=progress.steps))
        return None, best
    reason = ""
    for run in runs:
        try:
            return open_checkpoint(run / FOLDER / name_of(best)), best
        except (DamagedCheckpoint, UserError) as error:
            reason = reason or error.asked
    message = (
        f"result: the best weights, of step {best}, are not there, so the last ones are the result ({reason})"
    )
    observer.on_event(Warned(message=message, step=progress.steps))
    return None, best
