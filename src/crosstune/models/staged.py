"""Stage a result folder: check the disk space, move it to its place when done, or set it aside when unverified."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from crosstune.core.atomic_files import put_new, staging_folder
from crosstune.core.errors import UserError
from crosstune.models.checksums import write_checksums
from crosstune.models.disk import DiskFullError, disk_errors, ensure_space

UNVERIFIED = ".unverified"


class Unverified(UserError):
    """The written result failed its check. The folder is kept under a name that says so."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    result: Path
    """The path to write the result to; it does not exist yet."""
    scratch: Path
    """A folder for temporary files, removed afterwards."""


@contextmanager
def staged(out: Path, *, need_bytes: int) -> Iterator[Stage]:
    """Yield the paths for a result, and move it to `out` when the block ends. A kill leaves no `out`."""
    check_out(out)
    _make_parent(out)
    try:
        with _room(out, need_bytes), staging_folder(out) as home:
            stage = Stage(result=home / "result", scratch=home / "scratch")
            stage.scratch.mkdir()
            try:
                yield stage
                if stage.result.is_dir():
                    write_checksums(stage.result)
                put_new(stage.result, out)
            except Unverified:
                put_new(stage.result, unverified_path(out))
                raise
    except DiskFullError as error:
        raise UserError(
            error.message, why=error.why, do="free some space, or choose an --out on a larger disk"
        ) from error


def check_out(out: Path) -> None:
    """Raise a UserError unless `out` is free or an empty folder."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} exists already.", do="choose another --out, or remove the file first")
    if out.is_dir() and any(out.iterdir()):
        raise UserError(
            f"{out} is not empty.",
            why="its files would be lost or mixed with the result.",
            do="choose another --out, or remove the folder first",
        )


def unverified_path(out: Path) -> Path:
    """Return the first free path for a result that failed its check."""
    path, number = out.with_name(out.name + UNVERIFIED), 1
    while path.exists():
        number += 1
        path = out.with_name(f"{out.name}{UNVERIFIED}-{number}")
    return path


@contextmanager
def _room(out: Path, need_bytes: int) -> Iterator[None]:
    ensure_space(out.parent, need_bytes)
    with disk_errors(out.parent, need_bytes):
        yield


def _make_parent(out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"Cannot write to {out.parent}.", why=str(error), do="choose another --out"
        ) from error
