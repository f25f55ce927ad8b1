"""Notice during a run that its folder was renamed, replaced or removed, and say where its state is kept."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from crosstune.core.errors import UserError


class FolderGone(UserError):
    """The folder of a run was renamed, replaced or removed during training."""


class FolderWatch:
    """Check that the run folder is still at its path; a link to the same folder counts as the folder.

    If it is not, call `on_lost` once: with the folder's new path, or with the old path, made again, if it was removed.
    Without `enabled` nothing is checked.
    """

    def __init__(self, folder: Path, *, on_lost: Callable[[Path], None], enabled: bool = True) -> None:
        self.folder, self._on_lost = folder, on_lost
        self.error: FolderGone | None = None
        can_open = enabled and os.name != "nt"
        self._handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY) if can_open else None

    def look(self) -> FolderGone | None:
        """Return the error if the folder is gone."""
        if self.error is not None or self._handle is None or _is_same(self.folder, self._handle):
            return self.error
        now = _path_of(self._handle)
        if now is not None:
            self.error = FolderGone(
                f"The run folder {self.folder} was renamed to {now} during the run.",
                why="another process could use either name, so the run stopped; its steps are in a checkpoint there.",
                do=f"continue with: crosstune train --resume {now}",
            )
        elif _was_removed(self._handle) and _make(self.folder):
            self.error = FolderGone(
                f"The run folder {self.folder} was removed during the run.",
                why="its records and older checkpoints are lost; the last step is kept in a new checkpoint there.",
                do=f"continue with: crosstune train --resume {self.folder}; or remove the folder again",
            )
        else:  # the disk is gone: the next write fails, and nothing is written elsewhere
            return None
        self._on_lost(now or self.folder)
        return self.error

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


def _is_same(folder: Path, handle: int) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(folder.stat(), os.fstat(handle))
    return False


def _was_removed(handle: int) -> bool:
    """Return whether an open folder was deleted; a folder on a lost disk still has links."""
    with contextlib.suppress(OSError):
        return os.fstat(handle).st_nlink == 0
    return False


def _make(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
    return folder.is_dir()


def _path_of(handle: int) -> Path | None:
    """Return the current path of an open folder; None if it was removed or the system cannot tell."""
    with contextlib.suppress(OSError):
        if sys.platform == "darwin":
            import fcntl

            path = Path(os.fsdecode(fcntl.fcntl(handle, fcntl.F_GETPATH, bytes(1024)).split(b"\0")[0]))
        else:
            path = Path(f"/proc/self/fd/{handle}").readlink()
        return path if _is_same(path, handle) else None
    return None
