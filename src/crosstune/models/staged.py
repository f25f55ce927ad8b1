"""Stage a result folder beside its place: check for room, put it there when it is done, keep it apart when unverified."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from crosstune.core.atomic_files import put_new, staging_folder
from crosstune.core.errors import UserError
from crosstune.models.disk import DiskFullError, disk_errors, ensure_space

UNVERIFIED = ".unverified"


class Unverified(UserError):
    """What was written differs from what it should be. Its folder is kept, under a name that says so."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    result: Path
    """Where to write what becomes the folder that was asked for. It does not exist yet."""
    scratch: Path
    """A folder for intermediate files; it is removed afterwards."""


@contextmanager
def staged(out: Path, *, need_bytes: int) -> Iterator[Stage]:
    """Yield where to write a result; it is put at `out` when the block ends. A kill leaves a hidden folder and no `out`."""
    check_out(out)
    _make_parent(out)
    try:
        with _room(out, need_bytes), staging_folder(out) as home:
            stage = Stage(result=home / "result", scratch=home / "scratch")
            stage.scratch.mkdir()
            try:
                yield stage
                put_new(stage.result, out)
            except Unverified:
                put_new(stage.result, unverified_path(out))
                raise
    except DiskFullError as error:
        raise UserError(
            error.asked, why=error.why, do="free some space, or choose an --out on a larger disk"
        ) from error


def check_out(out: Path) -> None:
    """Raise unless a result can be put at `out`."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file.", do="choose another --out")
    if out.is_dir() and any(out.iterdir()):
        raise UserError(
            f"{out} is not empty.",
            why="what is in it would be lost or mixed with the result.",
            do="choose another --out, or remove the folder first",
        )


def unverified_path(out: Path) -> Path:
    """Return the first free name for a result at `out` that did not pass its check."""
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
