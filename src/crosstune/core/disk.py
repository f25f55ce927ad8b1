"""Measure free space and the hash of a file, and tell when an error means that a disk is full."""

from __future__ import annotations

import errno
import hashlib
import shutil
from pathlib import Path

# A quota or a limit on the size of one file stops a write just as a full disk does.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_BLOCK_BYTES = 2**20


def free_space(folder: Path) -> int:
    """Return the free bytes on the disk that holds `folder`, or would hold it."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def readable_bytes(count: int) -> str:
    """Return a size as people write it."""
    if count >= 10e9:
        return f"{count / 1e9:,.1f} GB"
    return f"{count / 1e6:,.0f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
