"""Name and list the checkpoints of a run, and remove leftovers."""

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
    """Return the staged folders that a kill during writing or removal left behind."""
    return atomic_files.leftovers(root, of=_is_ours)


def clear_leftovers(root: Path) -> int:
    """Remove the leftovers and return their number; only for the process that holds the lock of the run."""
    return atomic_files.clear_leftovers(root, of=_is_ours)


def point_latest(root: Path, target: Path) -> None:
    """Point the link `latest` at a checkpoint. It is for users and scripts; crosstune does not read it."""
    atomic_files.replace_link(root / LATEST, to=target.name)


def _is_ours(name: str) -> bool:
    return name == LATEST or _NAME.fullmatch(name) is not None
