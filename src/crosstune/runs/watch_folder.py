"""Notice during a run that its folder was renamed or removed, and keep its state where the folder is now."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from crosstune.core.errors import UserError
from crosstune.core.events import Event, StepMetrics

_GET_PATH = 50
"""F_GETPATH of macOS: the path of an open file."""
_LONGEST_PATH = 1024


class FolderGone(UserError):
    """The folder of a run was renamed or removed while it was trained."""


class FolderWatch:
    """An observer that looks after each step whether the run folder is still at its path.

    It calls `found` once, with the folder's new path, or with its old one if the folder was removed and made again.
    """

    def __init__(self, folder: Path, *, found: Callable[[Path], None]) -> None:
        self.folder, self._found = folder, found
        self.error: FolderGone | None = None
        self._handle = None if os.name == "nt" else os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    def on_step(self, metrics: StepMetrics) -> None:
        self.look()

    def on_event(self, event: Event) -> None:
        return None

    def look(self) -> FolderGone | None:
        """Return the error if the folder is gone; the first time, make sure that there is one to write to."""
        if self.error is None and self._handle is not None and not _is_same(self.folder, self._handle):
            now = _path_of(self._handle)
            if now is not None:
                self.error = _renamed(self.folder, now)
            elif _is_removed(self._handle) and _make(self.folder):
                self.error = _removed(self.folder)
            else:  # a disk that is gone: the next write says so, and nothing is written elsewhere
                return None
            self._found(now or self.folder)
        return self.error

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


class FirstStep:
    """Call a function at the first completed step: a start that fails before it must change nothing."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act

    def on_step(self, metrics: StepMetrics) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()

    def on_event(self, event: Event) -> None:
        return None


def _renamed(folder: Path, now: Path) -> FolderGone:
    return FolderGone(
        f"The run folder {folder} was renamed to {now} during the run.",
        why="another process could take either name, so the run stopped; its steps are in a checkpoint there.",
        do=f"continue with: crosstune train --resume {now}",
    )


def _removed(folder: Path) -> FolderGone:
    return FolderGone(
        f"The run folder {folder} was removed during the run.",
        why="its records and older checkpoints are lost; the last step is kept in a new checkpoint there.",
        do=f"continue with: crosstune train --resume {folder}; or remove the folder again",
    )


def _is_same(folder: Path, handle: int) -> bool:
    try:
        return os.path.samestat(folder.stat(), os.fstat(handle))
    except OSError:
        return False


def _is_removed(handle: int) -> bool:
    """Return whether an open folder was removed; a folder on a lost disk keeps its links."""
    try:
        return os.fstat(handle).st_nlink == 0
    except OSError:
        return False


def _make(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
    return folder.is_dir()


def _path_of(handle: int) -> Path | None:
    """Return the path of an open folder now; None if it was removed, or where the system cannot tell."""
    try:
        if sys.platform == "darwin":
            import fcntl

            name = fcntl.fcntl(handle, _GET_PATH, bytes(_LONGEST_PATH)).split(b"\0")[0]
            path = Path(os.fsdecode(name))
        else:
            path = Path(f"/proc/self/fd/{handle}").readlink()
    except OSError:
        return None
    return path if _is_same(path, handle) else None
