"""Measure free disk space, hash files, and name the errors that mean a full disk."""

from __future__ import annotations

import errno
import hashlib
import shutil
from pathlib import Path

# A quota or a file-size limit stops a write just as a full disk does.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_BLOCK_BYTES = 2**20


def free_space(folder: Path) -> int:
    """Return the free bytes on the disk of `folder`, which need not exist yet."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def readable_bytes(count: int) -> str:
    """Format a size for people."""
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
