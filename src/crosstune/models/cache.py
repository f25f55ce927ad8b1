"""Manage the model cache: one folder per model, complete or absent, even with several processes or after a kill."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from crosstune.core import __version__
from crosstune.core.errors import UserError
from crosstune.core.names import unknown_name
from crosstune.files.atomic_files import put_in_place, remove_folder, staged_name, staging_folder
from crosstune.files.json_fields import OBJECT, TEXT, map_of, object_with, whole, wrong_field
from crosstune.files.json_files import read_object, write_json
from crosstune.files.paths import CACHE_VARIABLE, cache_base
from crosstune.files.plain_files import UnreadableFile
from crosstune.models.staged import Progress, disk_errors, ensure_space, silent

MARKER = "crosstune.json"
LAYOUT = 1
"""Increase when models are made differently, so that cached ones are made again."""

Build = Callable[[Path, Path], Mapping[str, Any]]
"""(empty folder, scratch folder) -> the source of the model, after writing it into the folder."""

_LOCKS = ".locks"
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
    made_at: str
    problems: list[str]
    """The result of `check`; empty for a valid model."""


def cache_root(override: Path | None = None) -> Path:
    """Return the folder of cached models, in `override` or in the user's cache folder."""
    return cache_base(override) / "models"


def install(
    name: str,
    build: Build,
    *,
    need_bytes: int,
    source: Mapping[str, Any] | None = None,
    cache: Path | None = None,
    progress: Progress = silent,
) -> Path:
    """Return the folder of the model `name`; make it with `build` unless a valid one from `source` exists.

    The lock of a name is held while its staging folder is in use, so a staging folder whose lock is free is the
    leftover of a killed process.
    """
    root = cache_root(cache)
    target = root / name
    if not check(target, source=source):
        return target
    with _locked(root, name, progress=progress):
        problems = check(target, source=source)
        if not problems:
            return target
        if target.exists():
            _log.warning(
                "The cached model %s is not valid (%s) and is made again.", target, "; ".join(problems)
            )
        _sweep(root, locked=name)
        ensure_space(root, need_bytes)
        # A new name each time: a child of a killed process may still write into the old folder.
        with staging_folder(target) as stage, disk_errors(root, need_bytes):
            folder, scratch = stage / "model", stage / "scratch"
            folder.mkdir()
            scratch.mkdir()
            source = build(folder, scratch)
            _seal(folder, source)
            put_in_place(folder, target, aside=stage / "replaced")
    return target


def check(folder: Path, *, source: Mapping[str, Any] | None = None) -> list[str]:
    """Return the problems of a cached model: its marker, the sizes of its files and, if given, its source."""
    marker = _read_marker(folder)
    if marker is None:
        return [f"{MARKER} is missing or unreadable"]
    if marker.get("layout") != LAYOUT:
        return [f"it was made by crosstune {marker.get('crosstune')} with another layout"]
    problems = []
    if source is not None and marker.get("source") != dict(source):
        problems.append("it was made from other weights")
    for name, facts in marker["files"].items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != facts["bytes"]:
            problems.append(f"{name} has {path.stat().st_size:,} bytes instead of {facts['bytes']:,}")
    return problems


def list_models(*, cache: Path | None = None) -> list[CachedModel]:
    """Return all models in the cache, including damaged ones."""
    root = cache_root(cache)
    if not root.is_dir():
        return []
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    return [_describe(folder) for folder in folders]


def remove_model(name: str, *, cache: Path | None = None) -> int:
    """Delete a model from the cache and return the number of bytes freed."""
    root = cache_root(cache)
    models = {model.name: model for model in list_models(cache=cache)}
    if name not in models:
        raise unknown_name("cached model", name, models)
    with _locked(root, name, progress=silent):
        if (root / name).exists():
            remove_folder(root / name)
    return models[name].size_bytes


@contextmanager
def _locked(root: Path, name: str, *, progress: Progress) -> Iterator[None]:
    import filelock

    try:
        (root / _LOCKS).mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(_lock_path(root, name))
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


def _sweep(root: Path, *, locked: str) -> None:
    """Remove the leftovers of killed processes; `locked` is the name whose lock the caller holds."""
    import filelock

    for leftover in root.iterdir():
        name = staged_name(leftover)
        if name is None:
            continue
        if name == locked:
            shutil.rmtree(leftover, ignore_errors=True)
            continue
        try:
            with filelock.FileLock(_lock_path(root, name), timeout=0):
                shutil.rmtree(leftover, ignore_errors=True)
        except filelock.Timeout:
            continue


def _seal(folder: Path, source: Mapping[str, Any]) -> None:
    """Write the marker that makes the folder a valid model."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    marker = {
        "layout": LAYOUT,
        "crosstune": __version__,
        "made_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "source": dict(source),
        "files": {path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size} for path in files},
    }
    write_json(folder / MARKER, marker)


def _lock_path(root: Path, name: str) -> Path:
    return root / _LOCKS / f"{name}.lock"


def _read_marker(folder: Path) -> dict[str, Any] | None:
    try:
        marker = read_object(folder / MARKER)
    except UnreadableFile:
        return None
    return marker if wrong_field(marker, _MARKER_FIELDS, required=("files", "source")) is None else None


def _describe(folder: Path) -> CachedModel:
    marker = _read_marker(folder) or {}
    return CachedModel(
        name=folder.name,
        path=folder,
        size_bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        source=marker.get("source", {}),
        made_at=marker.get("made_at", ""),
        problems=check(folder),
    )
