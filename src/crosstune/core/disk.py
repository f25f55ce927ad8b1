"""Room on a disk, and the errors that mean there is none or that it is gone."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import sys
from pathlib import Path

# A quota or a limit on the size of one file stops a write just as a full disk does.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_CANNOT_SWAP = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})
_BLOCK_BYTES = 2**20
_SWAP = 2
"""RENAME_EXCHANGE of Linux and RENAME_SWAP of macOS."""


def free_space(folder: Path) -> int:
    """Free bytes on the disk that holds `folder`, or would hold it."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def readable_bytes(count: int) -> str:
    if count >= 10e9:
        return f"{count / 1e9:,.1f} GB"
    return f"{count / 1e6:,.0f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make what was created, renamed or removed in a folder last through a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def put_in_place(new: Path, target: Path, *, aside: Path) -> None:
    """A folder takes the place of another, which goes to `aside`. At every moment one of the two is at `target`,
    where the system can swap them; elsewhere there is none between two renames."""
    if not target.exists():
        new.rename(target)
    elif _swap(new, target):
        new.rename(aside)
    else:
        target.rename(aside)
        new.rename(target)


def _swap(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where the system or the disk cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    here = -100  # AT_FDCWD of Linux: paths are as everywhere
    first, second = os.fsencode(one.absolute()), os.fsencode(other.absolute())
    try:
        if sys.platform == "darwin":
            failed = libc.renamex_np(first, second, _SWAP)
        else:
            failed = libc.renameat2(here, first, here, second, _SWAP)
    except AttributeError:  # a C library without it
        return False
    if not failed:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_SWAP:
        return False
    raise OSError(code, os.strerror(code), str(one))
