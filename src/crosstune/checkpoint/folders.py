"""The folder of a run that holds its checkpoints: names, order, and what is not one."""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from crosstune.core.disk import sync_folder

FOLDER = "checkpoints"
LATEST = "latest"
_NAME = re.compile(r"step-(\d{8,})")
_STAGED = re.compile(r"\.(step-\d{8,}|trash|latest)\.[0-9a-f]{32}")


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    found = _NAME.fullmatch(folder.name)
    return int(found[1]) if found else None


def checkpoint_folders(root: Path) -> list[tuple[int, Path]]:
    """Every folder with the name of a checkpoint, the newest first. Nothing is said about what is in them."""
    if not root.is_dir():
        return []
    found = [(step, path) for path in root.iterdir() if (step := step_of(path)) is not None]
    return sorted(((s, p) for s, p in found if p.is_dir() and not p.is_symlink()), reverse=True)


def staging_path(root: Path, stem: str) -> Path:
    """A hidden name on the same file system, which nothing takes for a checkpoint."""
    return root / f".{stem}.{uuid.uuid4().hex}"


def leftovers(root: Path) -> Iterator[Path]:
    """What a kill left behind while it was being written or removed."""
    if root.is_dir():
        yield from (path for path in root.iterdir() if _STAGED.fullmatch(path.name))


def clear_leftovers(root: Path) -> int:
    """Remove them; only for whoever holds the run. Returns how many there were."""
    found = list(leftovers(root))
    for path in found:
        if path.is_symlink() or path.is_file():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)
    return len(found)


def set_aside(path: Path) -> Path:
    """Rename a checkpoint so that nothing continues from it, and keep it."""
    number = 1
    while (target := path.with_name(f"{path.name}~{number}")).exists():
        number += 1
    path.rename(target)
    sync_folder(path.parent)
    return target


def remove(path: Path) -> None:
    """Out of sight in one step, then gone: a kill in between leaves nothing half removed under its name."""
    trash = staging_path(path.parent, "trash")
    path.rename(trash)
    sync_folder(path.parent)
    shutil.rmtree(trash)


def point_latest(root: Path, target: Path) -> None:
    """Move `latest`. It is for people and scripts; crosstune itself looks at the checkpoints."""
    staged = staging_path(root, LATEST)
    staged.symlink_to(target.name)
    staged.replace(root / LATEST)
    sync_folder(root)
