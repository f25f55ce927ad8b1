"""Name and list the checkpoints of a run."""

from __future__ import annotations

import re
from pathlib import Path

from crosstune.files.atomic_files import replace_link

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


def point_latest(root: Path, target: Path) -> None:
    """Point the link `latest` at a checkpoint, for users and scripts; crosstune does not read it."""
    replace_link(root / LATEST, to=target.name)
