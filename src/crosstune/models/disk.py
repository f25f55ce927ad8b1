"""Check free disk space before work starts, and raise one error when the disk fills up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from crosstune.core.disk import NO_ROOM, free_space, readable_bytes
from crosstune.core.errors import UserError
from crosstune.core.user_paths import CACHE_VARIABLE

HUB_VARIABLE = "HF_HOME"


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
