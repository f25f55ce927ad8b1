"""Which checkpoints stay: the newest, the best by evaluation, the milestones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from crosstune.checkpoint.folders import checkpoint_folders
from crosstune.checkpoint.manifest import DamagedCheckpoint
from crosstune.checkpoint.read import open_checkpoint
from crosstune.core.atomic_files import remove_folder
from crosstune.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Keep:
    last_n: int
    best: bool = True
    """Keep the one with the lowest loss in an evaluation."""
    every: int = 0
    """Keep each whose step is a multiple of this, for good; 0 for none."""


def best_step(steps: Sequence[int], evaluations: Mapping[int, float]) -> int | None:
    judged = [step for step in steps if step in evaluations]
    return min(judged, key=lambda step: (evaluations[step], step)) if judged else None


def superfluous(steps: Sequence[int], keep: Keep, evaluations: Mapping[int, float]) -> list[int]:
    """Of these steps, the ones that may go, the oldest first."""
    kept = set(sorted(steps, reverse=True)[: keep.last_n])
    if keep.every:
        kept |= {step for step in steps if step % keep.every == 0}
    best = best_step(steps, evaluations)
    if keep.best and best is not None:
        kept.add(best)
    return sorted(set(steps) - kept)


def rotate(root: Path, keep: Keep, evaluations: Mapping[int, float], *, only_say: bool = False) -> list[Path]:
    """Remove what may go, but only once the newest has been read back and found whole. Returns what was removed, or
    (`only_say`) would be."""
    folders = checkpoint_folders(root)
    going = superfluous([step for step, _ in folders], keep, evaluations)
    if not going:
        return []
    try:
        open_checkpoint(folders[0][1])
    except DamagedCheckpoint as error:
        raise UserError(
            f"No checkpoint is removed: the newest, {folders[0][1].name}, does not read back as it was written.",
            why=error.why,
            do="check the disk; the older checkpoints are all kept",
        ) from error
    removed = [path for step, path in folders if step in set(going)]
    for path in reversed(removed if not only_say else []):
        remove_folder(path)
    return removed
