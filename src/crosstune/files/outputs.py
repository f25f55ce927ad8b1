"""Write the files and folders that a user names: check them before the work, then replace them atomically.

A pipe or a character device, such as /dev/stdout, is written into. Nothing else but a regular file is replaced.
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
from crosstune.files.plain_files import kind_of, no_room

_DIFFERENT = "free space, or choose a different file"
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
    overwrite: bool = True,
    streams: bool = True,
    makes_folder: bool = False,
) -> None:
    """Raise a UserError if a file cannot be written to `path`, or if it is one of the inputs. Call this before any work."""
    do = f"choose a different --{option}"
    if is_stream(path):
        if not streams:
            raise UserError(f"{path} cannot be written.", why=f"it is {kind_of(path)}.", do=do)
        return
    with _reporting(path, do=do):
        if path.exists():
            if not path.is_file():
                raise UserError(f"{path} cannot be written.", why=f"it is {kind_of(path)}.", do=do)
            if any(each is not None and each.exists() and path.samefile(each) for each in inputs):
                raise UserError(f"{path} is the input; the output would replace it.", do=do)
            if not overwrite:
                raise UserError(f"{path} already exists.", do=f"{do}, or remove the file first")
            if not os.access(path, os.W_OK):
                raise UserError(f"{path} cannot be written.", why="it is read-only.", do=do)
        target = _target(path)
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
    with _reporting(folder, do=do):
        existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        if not existing.is_dir():
            why = f"{existing} is {kind_of(existing)}, not a folder."
            raise UserError(f"Files cannot be written to {folder}.", why=why, do=do)
        _try(existing / folder.name)


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


def _try(path: Path) -> None:
    """Create and remove a file where `path` will be staged."""
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
        full = no_room(error)
        if full is None and not isinstance(error, OSError):
            raise
        why = (
            f"the disk is full or a limit was reached ({full})" if full else getattr(error, "strerror", None)
        )
        raise UserError(f"{path} cannot be written.", why=f"{why or error}.", do=do) from error
