"""Do something without the rights of the administrator, who may write and read everywhere."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOBODY = 65534


@contextmanager
def as_other_user() -> Iterator[None]:
    """Take the rights of a user without any for the block, if this is the administrator; otherwise change nothing.

    The whole process has them: import and open what the block needs before it.
    """
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        yield
        return
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def reachable_folder() -> Iterator[Path]:
    """Yield a new folder that other users can reach, which those of `tmp_path` are not; remove it afterwards."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
