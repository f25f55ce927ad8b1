"""Detect during a run that its folder was renamed, replaced or removed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from crosstune.core.errors import UserError


class FolderWatch:
    """Check that the run folder is still at its path, directly or as a link.

    If not, call `on_lost` once with the folder's new path, or with the old path, recreated, if the folder was removed.
    """

    def __init__(self, folder: Path, *, on_lost: Callable[[Path], None], enabled: bool = True) -> None:
        self.folder, self._on_lost = folder, on_lost
        self.error: UserError | None = None
        can_open = enabled and os.name != "nt"
        self._handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY) if can_open else None

    def look(self) -> UserError | None:
        """Return the error if the folder was renamed or removed."""
        if self.error is not None or self._handle is None or _is_same(self.folder, self._handle):
            return self.error
        now = _path_of(self._handle)
        what = f"renamed to {now}" if now is not None else "removed"
        if now is None and not self._recreate():
            return None  # the disk was lost: the next write fails, and nothing is written elsewhere
        place = now or self.folder
        self.error = UserError(
            f"The run folder {self.folder} was {what} during the run.",
            why=f"the run stopped; its last step is in a checkpoint in {place}.",
            do=f"continue with: crosstune train --resume {place}",
        )
        self._on_lost(place)
        return self.error

    def _recreate(self) -> bool:
        """Make the folder again if it was deleted; a folder on a lost disk still has links."""
        with contextlib.suppress(OSError):
            if self._handle is not None and os.fstat(self._handle).st_nlink == 0:
                self.folder.mkdir(exist_ok=True)
                return True
        return False

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


def _is_same(folder: Path, handle: int) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(folder.stat(), os.fstat(handle))
    return False


def _path_of(handle: int) -> Path | None:
    """Return the current path of an open folder; None if it was removed or the system does not report it."""
    with contextlib.suppress(OSError):
        if sys.platform == "darwin":
            import fcntl

            path = Path(os.fsdecode(fcntl.fcntl(handle, fcntl.F_GETPATH, bytes(1024)).split(b"\0")[0]))
        else:
            path = Path(f"/proc/self/fd/{handle}").readlink()
        return path if _is_same(path, handle) else None
    return None
