"""Every system call by which a run changes its folder is a place to die: count them, and die at the Nth."""

from __future__ import annotations

import io
import itertools
import os
import pathlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crosstune.files import atomic_files
from crosstune.files.run_record import RunRecord

_BY_PATH = ("open", "mkdir", "rename", "replace", "symlink", "unlink", "remove", "rmdir", "link", "truncate")
_BY_HANDLE = ("write", "fsync", "ftruncate")


class CrashPoints:
    """From `arm` on, calls that touch `root` are counted; at number `die_at` the process ends with SIGKILL.

    A write dies half-way: that it was whole is what the next point finds. Log lines, which Python's own files write,
    are points too.
    """

    def __init__(self, root: Path, *, die_at: int = 0, log: Path | None = None) -> None:
        self.root, self.die_at, self.log = str(root), die_at, log
        self.counting = True
        """Whether calls count now; outside of a part of a run they may not."""
        self._numbers = itertools.count(1)

    def arm(self) -> None:
        homes: list[Any] = [os]
        if hasattr(pathlib, "_NormalAccessor"):  # Python 3.10 keeps its own references
            homes.append(pathlib._NormalAccessor)
        for home, name in itertools.product(homes, _BY_PATH):
            if hasattr(home, name):
                setattr(home, name, self.watch(getattr(home, name), name, self._inside))
        for name in _BY_HANDLE:
            torn = _half_write if name == "write" else None
            setattr(os, name, self.watch(getattr(os, name), name, torn=torn))
        atomic_files._swap = self.watch(atomic_files._swap, "swap", self._inside)
        io.open = self.watch(io.open, "io.open", self._opens_to_write)
        RunRecord._append = self.watch(RunRecord._append, "log line", torn=_half_line)  # type: ignore[method-assign]

    def reach(self, name: str) -> bool:
        """Count one point; whether it is the one to die at."""
        if not self.counting:
            return False
        number = next(self._numbers)
        if self.log is not None:
            with open(self.log, "a", encoding="utf-8") as file:  # noqa: PTH123  (not one of the watched calls)
                file.write(f"{number} {name}\n")
        return number == self.die_at

    def watch(
        self,
        call: Callable[..., Any],
        name: str,
        counts: Callable[..., bool] = lambda *_, **__: True,
        *,
        torn: Any = None,
    ) -> Callable[..., Any]:
        """Return the call as a point to die at, where `counts` says so; `torn` does half of it before the death."""

        def watched(*args: Any, **options: Any) -> Any:
            if counts(*args, **options) and self.reach(name):
                if torn is not None:
                    torn(call, *args)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return watched

    def _inside(self, *paths: Any, dir_fd: int | None = None, **_: Any) -> bool:
        """A path in the folder, or one relative to a folder that is being removed."""
        return dir_fd is not None or any(str(path).startswith(self.root) for path in paths)

    def _opens_to_write(self, path: Any, mode: str = "r", *_: Any, **__: Any) -> bool:
        return str(path).startswith(self.root) and mode[0] in "wax"


def _half_write(call: Callable[..., int], handle: int, data: Any) -> None:
    call(handle, memoryview(data)[: len(data) // 2])


def _half_line(call: Any, record: RunRecord, file: Any, data: Any) -> None:
    file.write('{"time": 1.0, "kind"')
    file.flush()
