"""Write a result folder: check the disk space, move the folder into place when complete, keep a wrong one apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from crosstune.core.errors import UserError
from crosstune.files.atomic_files import put_new, staging_folder
from crosstune.files.paths import CACHE_VARIABLE
from crosstune.files.plain_files import NO_ROOM, free_space, readable_bytes
from crosstune.models.file_hashes import write_checksums

HUB_VARIABLE = "HF_HOME"
UNVERIFIED = ".unverified"


class Progress(Protocol):
    """Called with the stage ('wait', 'download', 'convert', 'verify') and bytes; `total` is None when unknown."""

    def __call__(self, stage: str, done: int, total: int | None, /) -> None: ...


def silent(stage: str, done: int, total: int | None, /) -> None:
    """Report no progress."""


class DiskFullError(UserError):
    """A model does not fit on the disk of the cache."""


def ensure_space(
    folder: Path, need_bytes: int, *, variable: str = CACHE_VARIABLE, free_bytes: int | None = None
) -> None:
    """Raise DiskFullError unless the disk of `folder` has `need_bytes` free; `free_bytes` replaces the measurement."""
    free = free_space(folder) if free_bytes is None else free_bytes
    if free < need_bytes:
        raise disk_full(folder, need_bytes, variable=variable, free_bytes=free)


@contextmanager
def disk_errors(folder: Path, need_bytes: int, *, variable: str = CACHE_VARIABLE) -> Iterator[None]:
    """Raise the error of `ensure_space` when the disk fills up inside the block."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise disk_full(folder, need_bytes, variable=variable, cause=error.strerror) from error


def disk_full(
    folder: Path,
    need_bytes: int,
    *,
    variable: str = CACHE_VARIABLE,
    free_bytes: int | None = None,
    cause: str | None = None,
) -> DiskFullError:
    free = free_space(folder) if free_bytes is None else free_bytes
    reason = f" ({cause})" if cause else ""
    return DiskFullError(
        f"There is not enough disk space for the model in {folder}.",
        why=f"about {readable_bytes(need_bytes)} are needed there and {readable_bytes(free)} are free{reason}.",
        do=f"free some space, or set the environment variable {variable} to a folder on a larger disk",
    )


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
    """Yield the paths for a result, and move it to `out` when the block ends. A kill leaves no `out`."""
    check_out(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"Cannot write to {out.parent}.", why=str(error), do="choose another --out"
        ) from error
    try:
        ensure_space(out.parent, need_bytes)
        with disk_errors(out.parent, need_bytes), staging_folder(out) as home:
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
