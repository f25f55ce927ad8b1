"""Manage the model cache: one folder per model, complete or absent, even with several processes or after a crash."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from crosstune.config.load import cache_base
from crosstune.core import __version__
from crosstune.core.errors import UserError
from crosstune.core.names import unknown_name
from crosstune.files.atomic_files import put_in_place, remove_abandoned, remove_folder, staging_folder
from crosstune.files.json_fields import OBJECT, TEXT, map_of, object_with, whole, wrong_field
from crosstune.files.json_files import read_object, write_json
from crosstune.files.paths import CACHE_VARIABLE
from crosstune.files.plain_files import UnreadableFile
from crosstune.models.file_hashes import check_checksums
from crosstune.models.staged import Progress, disk_space, silent

MARKER = "crosstune.json"
LAYOUT = 1
"""Increase when models are made differently, so that cached models are rebuilt."""
_MARKER_FIELDS = {
    "files": map_of(object_with({"bytes": whole(0)})),
    "source": OBJECT,
    "made_at": TEXT,
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CachedModel:
    name: str
    path: Path
    size_bytes: int
    source: Mapping[str, Any]
    problems: list[str]
    """The result of `check`; empty for a valid model."""


def cache_root() -> Path:
    """Return the folder of cached models."""
    return cache_base() / "models"


def install(
    name: str,
    build: Callable[[Path, Path], object],
    *,
    need_bytes: int,
    source: Mapping[str, Any],
    progress: Progress = silent,
) -> Path:
    """Return the folder of the model `name`. Unless it is valid and from `source`, make it with `build(folder, scratch)`."""
    root = cache_root()
    target = root / name
    if not check(target, source=source):
        return target
    remove_abandoned(root)
    with _locked(root, name, progress=progress):
        problems = check(target, source=source)
        if not problems:
            return target
        if target.exists():
            _log.warning(
                "The cached model %s is not valid (%s) and is made again.", target, "; ".join(problems)
            )
        # A new name each time: a child of a killed process may still write into the old folder.
        with disk_space(root, need_bytes), staging_folder(target) as stage:
            folder, scratch = stage / "model", stage / "scratch"
            folder.mkdir()
            scratch.mkdir()
            build(folder, scratch)
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            marker = {
                "layout": LAYOUT,
                "crosstune": __version__,
                "made_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "source": dict(source),
                "files": {
                    path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size} for path in files
                },
            }
            write_json(folder / MARKER, marker)
            put_in_place(folder, target, aside=stage / "replaced")
    return target


def check(folder: Path, *, source: Mapping[str, Any] | None = None) -> list[str]:
    """Return the problems of a cached model: its marker and the sizes of its files; if its source is given, also that and
    the hashes, if it has them."""
    marker = _read_marker(folder)
    if marker is None:
        return [f"{MARKER} is missing or unreadable"]
    if marker.get("layout") != LAYOUT:
        return [f"it was made by crosstune {marker.get('crosstune')} with a different layout"]
    problems = []
    if source is not None and marker.get("source") != dict(source):
        problems.append("it was made from other weights")
    for name, facts in marker["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != facts["bytes"]:
            problems.append(f"{name} is missing or incomplete")
    if source is not None and not problems:
        try:
            check_checksums(folder)
        except UserError as error:
            problems.append(error.why.rstrip("."))
    return problems


def list_models() -> list[CachedModel]:
    """Return all models in the cache, including damaged ones."""
    root = cache_root()
    folders = [path for path in root.glob("*") if path.is_dir() and not path.name.startswith(".")]
    return [
        CachedModel(
            name=folder.name,
            path=folder,
            size_bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
            source=(_read_marker(folder) or {}).get("source", {}),
            problems=check(folder),
        )
        for folder in sorted(folders)
    ]


def remove_model(name: str) -> int:
    """Delete a model from the cache and return the number of bytes freed."""
    root = cache_root()
    models = {model.name: model for model in list_models()}
    if name not in models:
        raise unknown_name("cached model", name, models)
    with _locked(root, name, progress=silent):
        if (root / name).exists():
            remove_folder(root / name)
    return models[name].size_bytes


@contextlib.contextmanager
def _locked(root: Path, name: str, *, progress: Progress) -> Iterator[None]:
    import filelock

    path = root / ".locks" / f"{name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            progress("wait", 0, None)
            lock.acquire()
    except OSError as error:
        raise UserError(
            f"Cannot write to the model cache {root}.",
            why=str(error),
            do=f"set the environment variable {CACHE_VARIABLE} to a folder you can write to",
        ) from error
    try:
        yield
    finally:
        lock.release()


def _read_marker(folder: Path) -> dict[str, Any] | None:
    try:
        marker = read_object(folder / MARKER)
    except UnreadableFile:
        return None
    return marker if wrong_field(marker, _MARKER_FIELDS, required=("files", "source")) is None else None
