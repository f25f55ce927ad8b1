"""Name and list the checkpoints of a run, and remove incomplete ones."""

from __future__ import annotations

import re
from pathlib import Path

from crosstune.files import atomic_files

FOLDER = "checkpoints"
LATEST = "latest"
_NAME = re.compile(r"step-(\d{8,})")


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    found = _NAME.fullmatch(folder.name)
    return int(found[1]) if found else None


def checkpoint_folders(root: Path) -> list[tuple[int, Path]]:
    """Return all folders named like a checkpoint, newest first, without opening them."""
    if not root.is_dir():
        return []
    found = [(step, path) for path in root.iterdir() if (step := step_of(path)) is not None]
    return sorted(((s, p) for s, p in found if p.is_dir() and not p.is_symlink()), reverse=True)


def leftovers(root: Path) -> list[Path]:
    """Return the incomplete folders of writes and removals that were killed."""
    return atomic_files.leftovers(root, of=_is_checkpoint)


def clear_leftovers(root: Path) -> int:
    """Remove the leftovers and return their number. The caller holds the run lock."""
    return atomic_files.clear_leftovers(root, of=_is_checkpoint)


def point_latest(root: Path, target: Path) -> None:
    """Point the link `latest` at a checkpoint, for users and scripts; crosstune does not read it."""
    atomic_files.replace_link(root / LATEST, to=target.name)


def _is_checkpoint(name: str) -> bool:
    return name == LATEST or _NAME.fullmatch(name) is not None
