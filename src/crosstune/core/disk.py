"""Room on a disk, and the errors that mean there is none or that it is gone."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

# A quota or a limit on the size of one file stops a write just as a full disk does.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


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


def sync_folder(folder: Path) -> None:
    """Make what was created, renamed or removed in a folder last through a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
