"""Lock a run folder: only one process at a time chooses its checkpoint and writes to it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from crosstune.core.errors import UserError

if TYPE_CHECKING:
    from filelock import FileLock

LOCKS = ".locks"
"""Folder of the lock files, next to the run folders: a lock stays in place when its run is moved aside."""

_PATIENCE_S = 0.2
"""Time to wait for a lock: `is_held` acquires it for a moment."""


class InUse(UserError):
    """Another process holds the run lock."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            f"{folder} is in use.",
            why="another process is training or unpacking a run there.",
            do="wait for it or stop it, or choose a different --name",
        )


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an OSError in the `with` block into a UserError about the run folder."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"Cannot write the run folder {folder}.",
            why=f"{error.strerror or error}: {_existing(folder.parent)}.",
            do="choose a different --output_dir",
        ) from error


def check_place(folder: Path) -> None:
    """Raise a UserError if a run folder cannot be made there; leave nothing behind."""
    with writing(folder), tempfile.TemporaryDirectory(prefix=".crosstune-", dir=_existing(folder.parent)):
        pass


def _existing(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    return next((place for place in (folder, *folder.parents) if os.access(place, os.F_OK)), Path("/"))


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold a run folder's lock, even before it exists; raise InUse when another process holds it. Without a run folder,
    the lock file is removed at the end."""
    # Lock a link under its own name and its target's: a run may be moved aside under either.
    names = {folder.parent.resolve() / folder.name, folder.resolve()}
    with contextlib.ExitStack() as stack:
        for run in sorted(names):
            stack.enter_context(_hold_one(run, shown=folder))
        yield


@contextlib.contextmanager
def _hold_one(run: Path, *, shown: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    locks = run.parent / LOCKS
    made = [path for path in (locks, *locks.parents) if not path.exists()]
    lock = FileLock(locks / f"{run.name}.lock")
    with writing(shown):
        try:
            _acquire(lock, locks)
        except Timeout:
            raise InUse(shown) from None
    try:
        yield
    finally:
        if not run.exists():
            _remove(Path(lock.lock_file), made)
        lock.release()


def _acquire(lock: FileLock, locks: Path) -> None:
    for attempt in range(3):
        try:
            locks.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=_PATIENCE_S, poll_interval=_PATIENCE_S / 4)
            return
        except FileNotFoundError:  # another process without a run removed the folder
            if attempt == 2:
                raise


def _remove(lock: Path, folders: Sequence[Path]) -> None:
    """Remove the lock file and the empty folders made for it. Another process that just opened the file notices: filelock
    compares the file with its path."""
    with contextlib.suppress(OSError):  # others use them
        lock.unlink()
        for folder in folders:
            folder.rmdir()


def is_held(folder: Path) -> bool | None:
    """Return True if a process holds a run folder's lock; None if the lock is missing or cannot be opened."""
    from filelock import FileLock, Timeout

    run = folder.resolve()
    path = run.parent / LOCKS / f"{run.name}.lock"
    if not path.is_file():
        return None
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError:  # not ours to write
        return None
    lock.release()
    return False
