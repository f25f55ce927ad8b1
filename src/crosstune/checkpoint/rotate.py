"""Remove old checkpoints; keep the newest, the best by evaluation, and milestones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from crosstune.checkpoint.folders import checkpoint_folders
from crosstune.checkpoint.manifest import DamagedCheckpoint
from crosstune.checkpoint.read import open_checkpoint
from crosstune.core.errors import UserError
from crosstune.files.atomic_files import remove_folder


@dataclass(frozen=True, kw_only=True)
class Keep:
    last_n: int
    best: bool = True
    """Keep the checkpoint with the lowest evaluation loss."""
    every: int = 0
    """Keep checkpoints whose step is a multiple of this; 0: none."""


def lowest(steps: Sequence[int], evaluations: Mapping[int, float]) -> int | None:
    """Return the step with the lowest finite evaluation loss, the earliest on a tie."""
    evaluated = [step for step in steps if math.isfinite(evaluations.get(step, math.nan))]
    return min(evaluated, key=lambda step: (evaluations[step], step)) if evaluated else None


def superfluous(steps: Sequence[int], keep: Keep, evaluations: Mapping[int, float]) -> list[int]:
    """Return the steps whose checkpoints may be removed, oldest first."""
    kept = set(sorted(steps, reverse=True)[: keep.last_n])
    if keep.every:
        kept |= {step for step in steps if step % keep.every == 0}
    best = lowest(steps, evaluations)
    if keep.best and best is not None:
        kept.add(best)
    return sorted(set(steps) - kept)


def rotate(root: Path, keep: Keep, evaluations: Mapping[int, float], *, dry_run: bool = False) -> list[Path]:
    """Verify the newest checkpoint, then remove superfluous ones and return them; with `dry_run`, only return them."""
    folders = checkpoint_folders(root)
    steps = superfluous([step for step, _ in folders], keep, evaluations)
    if not steps:
        return []
    try:
        open_checkpoint(folders[0][1])
    except DamagedCheckpoint as error:
        raise UserError(
            f"No checkpoint is removed: the newest, {folders[0][1]}, cannot be read back.",
            why=error.why,
            do="check the disk; all older checkpoints are kept",
        ) from error
    removed = [path for step, path in folders if step in set(steps)]
    for path in reversed(removed if not dry_run else []):
        remove_folder(path)
    return removed
