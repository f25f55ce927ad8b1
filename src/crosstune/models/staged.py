"""Write a result folder: check the disk space, move the folder into place when complete, and keep a failed result apart."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from crosstune.core.errors import UserError
from crosstune.files.atomic_files import put_new, remove_abandoned, staging_folder
from crosstune.files.outputs import check_output_folder, check_output_name, is_stream
from crosstune.files.paths import CACHE_VARIABLE
from crosstune.files.plain_files import (
    NO_ROOM,
    disk_full_reason,
    free_space,
    kind_of,
    readable_bytes,
    room_advice,
)
from crosstune.files.run_record import owning_run
from crosstune.models.file_hashes import write_checksums

LARGER_CACHE = f"set the environment variable {CACHE_VARIABLE} to a folder on a larger disk"
_UNVERIFIED = ".unverified"


class Progress(Protocol):
    """Called with the stage (wait, download, convert, verify), the bytes done and the total, None if unknown."""

    def __call__(self, stage: str, done: int, total: int | None, /) -> None: ...


def silent(stage: str, done: int, total: int | None, /) -> None:
    """Report no progress."""


class DiskFullError(UserError):
    """The disk has too little space for a model."""

    def __init__(
        self, folder: Path, need_bytes: int, *, larger: str = LARGER_CACHE, cause: str | None = None
    ) -> None:
        self.cause = cause
        reason = f"the system reports {cause!r}; " if cause else ""
        free, cause = free_space(folder), cause or os.strerror(errno.ENOSPC)
        if free > need_bytes and cause not in map(os.strerror, NO_ROOM):  # the words of a library, as of MLX
            cause = os.strerror(errno.EFBIG)
        super().__init__(
            f"There is not enough disk space for the model in {folder}.",
            why=f"{reason}it needs about {readable_bytes(need_bytes)}, and {readable_bytes(free)} are free.",
            do=room_advice(cause, larger),
        )


@contextmanager
def disk_space(folder: Path, need_bytes: int, *, larger: str = LARGER_CACHE) -> Iterator[None]:
    """Raise DiskFullError if less than `need_bytes` are free, or if the disk fills up in the `with` block, also in an inner
    one: the outer folder is the one that the user knows."""
    if free_space(folder) < need_bytes:
        raise DiskFullError(folder, need_bytes, larger=larger)
    try:
        yield
    except DiskFullError as error:
        raise DiskFullError(folder, need_bytes, larger=larger, cause=error.cause) from error
    except Exception as error:  # libraries have their own errors for a full disk
        if (cause := disk_full_reason(error)) is None:
            raise
        raise DiskFullError(folder, need_bytes, larger=larger, cause=cause) from error


class Unverified(UserError):
    """The written result failed its check; its folder is kept as `unverified_path`."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    result: Path
    """The path to write the result to; it does not exist yet."""
    scratch: Path
    """A folder for temporary files, removed afterwards."""


@contextmanager
def staged(out: Path, *, need_bytes: int) -> Iterator[Stage]:
    """Yield the paths for a result, and move it to `out` at the end. A crash leaves no `out`."""
    check_out(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(out.parent)
    larger = "choose an --out on a larger disk"
    with disk_space(out.parent, need_bytes, larger=larger), staging_folder(out) as home:
        stage = Stage(result=home / "result", scratch=home / "scratch")
        stage.scratch.mkdir()
        try:
            yield stage
            if stage.result.is_dir():
                write_checksums(stage.result)
            _put(stage.result, out)
        except Unverified:
            put_new(stage.result, unverified_path(out))
            raise


def _put(result: Path, out: Path) -> None:
    """Move a result to `out`; raise a UserError if another process has put one there since."""
    check_out(out)
    try:
        put_new(result, out)
    except OSError as error:
        if disk_full_reason(error) is not None:
            raise
        raise UserError(
            f"The result cannot be moved to {out}.", why=f"{error.strerror}.", do="choose a different --out"
        ) from error


def check_out(out: Path) -> None:
    """Raise a UserError unless `out` is free or an empty folder, outside of a run's own folders, and can be written."""
    do = "choose a different --out"
    check_output_name(out, option="out")
    if is_stream(out):
        raise UserError(f"{out} cannot be written.", why=f"it is {kind_of(out)}.", do=do)
    if (run := owning_run(Path(os.path.realpath(out)))) is not None:
        raise UserError(f"{out} cannot be written.", why=f"it belongs to the run {run}.", do=do)
    if out.is_symlink() and not out.exists():
        raise UserError(
            f"{out} already exists.", why="it is a broken link.", do=f"{do}, or remove the link first"
        )
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} already exists.", do=f"{do}, or remove the file first")
    if out.is_dir() and any(out.iterdir()):
        raise UserError(
            f"{out} is not empty.", do=do if out == out.parent else f"{do}, or remove the folder first"
        )
    for folder in (out.parent, out):
        check_output_folder(folder, option="out")


def unverified_path(out: Path) -> Path:
    """Return the first free path for a result that failed its check."""
    path, number = out.with_name(out.name + _UNVERIFIED), 1
    while path.exists():
        number += 1
        path = out.with_name(f"{out.name}{_UNVERIFIED}-{number}")
    return path
