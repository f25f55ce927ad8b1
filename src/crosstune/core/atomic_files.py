"""Write files and folders atomically: stage them beside their place, sync them to the disk, rename them.

A reader, a kill or a loss of power finds the old contents or the new ones, never a part of them. Everything staged has
a hidden name made by `staging_path`, so what a killed process left behind can be found and cleared.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_STAGED = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{32}")
_CANNOT_SWAP = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})
_SWAP = 2
"""RENAME_EXCHANGE of Linux and RENAME_SWAP of macOS."""
_AT_FDCWD = -100
"""Linux: paths are relative to the working directory, as everywhere else."""


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, replacing an older one in one step."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file, replacing an older one in one step."""
    with staged_file(path) as staged:
        staged.write_bytes(data)


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """Yield the name to write a file under; it replaces `path` when the block ends, and is removed if the block fails."""
    staged = staging_path(path)
    try:
        yield staged
        _sync_file(staged)
        staged.replace(path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def replace_link(link: Path, *, to: str) -> None:
    """Point a symbolic link at `to`, in one step if it exists already."""
    staged = staging_path(link)
    try:
        staged.symlink_to(to)
        staged.replace(link)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    sync_folder(link.parent)


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """Make a hidden folder beside `target`, private to this user, and remove it with what is left in it afterwards."""
    folder = staging_path(target)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put_new(new: Path, target: Path) -> None:
    """Sync a staged folder to the disk and rename it to `target`. Only an empty folder may be there already."""
    _sync_tree(new)
    if target.is_dir():
        target.rmdir()
    new.rename(target)
    sync_folder(target.parent)


def put_in_place(new: Path, target: Path, *, aside: Path) -> None:
    """Sync a staged folder to the disk and put it at `target`; an older folder there is moved to `aside`.

    One of the two is at `target` at every moment where the system can swap names; elsewhere `target` is missing
    between two renames.
    """
    _sync_tree(new)
    if not target.exists():
        new.rename(target)
    elif _swap(new, target):
        new.rename(aside)
    else:
        target.rename(aside)
        new.rename(target)
    sync_folder(target.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder. It is renamed first, so that a kill leaves no half of it under its name."""
    trash = staging_path(folder)
    folder.rename(trash)
    sync_folder(folder.parent)
    shutil.rmtree(trash)


def set_aside(path: Path) -> Path:
    """Rename a file or folder to the first free `<name>~<n>`, so that it is kept and not used; return its new path."""
    number = 1
    while (target := path.with_name(f"{path.name}~{number}")).exists():
        number += 1
    path.rename(target)
    sync_folder(path.parent)
    return target


def staging_path(target: Path) -> Path:
    """Return a new hidden name beside `target`, on the same file system."""
    return target.with_name(f".{target.name}.{uuid.uuid4().hex}")


def staged_name(path: Path) -> str | None:
    """Return the name of the target that `path` was staged for; None if it is not a staged file or folder."""
    found = _STAGED.fullmatch(path.name)
    return found["name"] if found else None


def leftovers(folder: Path, *, of: Callable[[str], object]) -> list[Path]:
    """Return what killed processes left in `folder`, for targets whose name `of` accepts."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if (name := staged_name(path)) is not None and of(name))


def clear_leftovers(folder: Path, *, of: Callable[[str], object]) -> int:
    """Remove the leftovers and return how many there were. Only the process that holds the targets may do so."""
    found = leftovers(folder, of=of)
    for path in found:
        if path.is_symlink() or path.is_file():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)
    return len(found)


def sync_folder(folder: Path) -> None:
    """Make what was created, renamed or removed in a folder survive a loss of power."""
    if os.name != "nt":  # Windows has no handle on a folder that could be synced
        _sync(folder, os.O_RDONLY)


def _sync_tree(root: Path) -> None:
    """Sync a file, or a folder with everything in it."""
    if root.is_file():
        _sync_file(root)
        return
    for folder, _, files in os.walk(root):
        for name in files:
            if not (path := Path(folder, name)).is_symlink():
                _sync_file(path)
        sync_folder(Path(folder))


def _sync_file(path: Path) -> None:
    # Windows syncs only through a handle that may write; elsewhere a read-only file can be synced, too.
    _sync(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _swap(one: Path, other: Path) -> bool:
    """Exchange two names in one step; return False where the system or the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    first, second = os.fsencode(one.absolute()), os.fsencode(other.absolute())
    try:
        if sys.platform == "darwin":
            failed = libc.renamex_np(first, second, _SWAP)
        else:
            failed = libc.renameat2(_AT_FDCWD, first, _AT_FDCWD, second, _SWAP)
    except AttributeError:  # a C library without it
        return False
    if not failed:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_SWAP:
        return False
    raise OSError(code, os.strerror(code), str(one))
