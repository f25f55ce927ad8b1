"""Write the files and folders that a user names: check them before the work, then replace them atomically.

A pipe or a character device, such as /dev/stdout, is written into. A regular file is replaced only if the user asked for
that or crosstune wrote it, and never if it belongs to a run.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from crosstune.core.errors import UserError
from crosstune.files.atomic_files import remove_abandoned, staged_file, staging_path
from crosstune.files.plain_files import disk_full_reason, kind_of, room_advice
from crosstune.files.run_record import owning_run

_DIFFERENT = "choose a different file"
_MARKED_BYTES = 4096
_STREAMS = {"stdout": 1, "stderr": 2}
_OPEN_FILE = re.compile(r"/dev/(stdout|stderr)|/(?:dev|proc/self)/fd/([0-9]{1,9})")
"""Files that are already open in this process; replacing one would separate it from its reader."""


def is_stream(path: Path) -> bool:
    """True for a pipe, a character device or an open file of this process: an output that is written into."""
    if _open_number(path) is not None:
        return True
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def check_output(
    path: Path,
    *,
    option: str,
    inputs: Sequence[Path | None] = (),
    overwrite: bool | None = None,
    mark: bytes | None = None,
    streams: bool = True,
    makes_folder: bool = False,
) -> None:
    """Raise a UserError if a file cannot be written to `path`, if it is an input or belongs to a run, or if it exists, unless
    `overwrite` or its first bytes contain the `mark` of crosstune's files. Call this before any work.

    `overwrite` is None for a command without this option."""
    do = f"choose a different --{option}"
    check_output_name(path, option=option)
    if is_stream(path):
        if not streams:
            raise UserError(f"{path} cannot be written.", why=f"it is {kind_of(path)}.", do=do)
        return
    with _reporting(path, do=do):
        target = _target(path)
        if (run := owning_run(target)) is not None:
            raise UserError(f"{path} cannot be written.", why=f"it belongs to the run {run}.", do=do)
        if path.exists():
            if not path.is_file():
                raise UserError(f"{path} cannot be written.", why=f"it is {kind_of(path)}.", do=do)
            if any(each is not None and each.exists() and path.samefile(each) for each in inputs):
                raise UserError(f"{path} is the input; the output would replace it.", do=do)
            if not (overwrite or _is_marked(path, mark)):
                why = "" if mark is None else "it is not a page that crosstune wrote."
                other = "remove the file first" if overwrite is None else "pass --overwrite to replace it"
                raise UserError(f"{path} already exists.", why=why, do=f"{do}, or {other}")
            if not os.access(path, os.W_OK):
                raise UserError(f"{path} cannot be written.", why="it is read-only.", do=do)
        if makes_folder:
            check_output_folder(target.parent, option=option)
        elif not target.parent.is_dir():
            raise UserError(
                f"{path} cannot be written.",
                why=f"there is no folder {target.parent}.",
                do=f"make the folder, or {do}",
            )
        if target.parent.is_dir():
            remove_abandoned(target.parent)
            _try(target)


def check_output_folder(folder: Path, *, option: str) -> None:
    """Raise a UserError if files cannot be written to `folder`, which need not exist. Call this before any work."""
    do = f"choose a different --{option}"
    check_output_name(folder, option=option)
    with _reporting(folder, do=do):
        existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        if not existing.is_dir():
            why = f"{existing} is {kind_of(existing)}, not a folder."
            raise UserError(f"Files cannot be written to {folder}.", why=why, do=do)
        _try(existing / (folder.name or "output"))  # the root and `.` have no name


def check_output_name(path: Path, *, option: str) -> None:
    """Raise a UserError for a name that would break the lines it is printed in."""
    if not path.name.isprintable():
        raise UserError(
            f"{path.name!r} cannot be the name of an output.",
            why="it has control characters.",
            do=f"choose a different --{option}",
        )


def write_output(path: Path, data: bytes) -> None:
    """Write a file that the user named: replace a regular file atomically, write into a pipe or a device."""
    if is_stream(path):
        with open_stream(path) as file:
            send(file, data, path=path)
        return
    with _reporting(path, do=_DIFFERENT):
        target = _target(path)
        with staged_file(target) as staged:
            staged.write_bytes(data)
            if target.exists():
                shutil.copymode(target, staged)


def open_stream(path: Path) -> FileIO:
    """Open a pipe or a device for writing; an open file of this process at its position."""
    assert is_stream(path), path
    with _reporting(path, do=_DIFFERENT):
        if (number := _open_number(path)) is None:
            return path.open("wb", buffering=0)
        sys.stdout.flush()
        return os.fdopen(os.dup(number), "wb", buffering=0)


def send(file: FileIO, data: bytes, *, path: Path) -> None:
    """Write all of `data` to the stream of `path`."""
    rest = memoryview(data)
    with _reporting(path, do=_DIFFERENT):
        while rest:
            rest = rest[file.write(rest) or 0 :]


def _open_number(path: Path) -> int | None:
    """Return the descriptor that a path such as /dev/stdout stands for."""
    found = _OPEN_FILE.fullmatch(str(path.absolute()))
    return None if found is None else _STREAMS.get(found[1]) or int(found[2])


def _target(path: Path) -> Path:
    """Return the path behind links, so that the file is replaced and not its link."""
    return Path(os.path.realpath(path))


def _is_marked(path: Path, mark: bytes | None) -> bool:
    if mark is None:
        return False
    with path.open("rb") as file:
        return mark in file.read(_MARKED_BYTES)


def _try(path: Path) -> None:
    """Create and remove a file at the staging place of `path`."""
    staged = staging_path(path)
    staged.touch()
    staged.unlink()


@contextmanager
def _reporting(path: Path, *, do: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        full = disk_full_reason(error)
        if full is None and not isinstance(error, OSError):
            raise
        why = full or getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be written.", why=f"{why}.", do=room_advice(full, do)) from error
