"""Write files and folders atomically: stage them next to the target, fsync, then rename.

After a crash or a power loss, a reader finds the old or the new contents, never a mix. Staged files have hidden names that
identify their process, so leftovers of a killed process can be found and removed.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import os
import platform
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from crosstune.files.plain_files import readable_bytes

_STAGED = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{32}")
_CANNOT_SWAP = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})
_SWAP = 2
"""RENAME_EXCHANGE on Linux and RENAME_SWAP on macOS."""
_AT_FDCWD = -100
"""Linux: resolve relative paths against the working directory."""
_OLD_S = 7 * 86400
_log = logging.getLogger(__name__)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file, replacing an existing one atomically."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file, replacing an existing one atomically."""
    with staged_file(path) as staged:
        staged.write_bytes(data)


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to. It replaces `path` at the end of the context, and is removed on an error."""
    staged = staging_path(path)
    with _staging(staged, target=path):
        yield staged
        _sync_file(staged)
        staged.replace(path)
    sync_folder(path.parent)


@contextmanager
def _staging(staged: Path, *, target: Path) -> Iterator[None]:
    """Remove a staged file on an error, and report the target in an OSError."""
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            staged.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and _is_about(error, staged):
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise


def _is_about(error: OSError, path: Path) -> bool:
    """True if an error names the path, or no path, as a failed write or sync."""
    return error.filename is None or str(path) in (error.filename, error.filename2)


def replace_link(link: Path, *, to: str) -> None:
    """Point a symbolic link at `to`, replacing an existing link atomically."""
    staged = staging_path(link)
    with _staging(staged, target=link):
        staged.symlink_to(to)
        staged.replace(link)
    sync_folder(link.parent)


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """Yield a new hidden folder next to `target`, readable by this user only; remove it at the end of the context. An OSError
    reports the path below `target`."""
    folder = staging_path(target)
    try:
        folder.mkdir(mode=0o700)
        yield folder
    except OSError as error:
        name = str(error.filename)
        if error.errno is None or not name.startswith(str(folder)):
            raise
        raise OSError(error.errno, error.strerror, name.replace(str(folder), str(target), 1)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put_new(new: Path, target: Path) -> None:
    """Sync a staged folder to disk and rename it to `target`. The target must be missing or an empty folder."""
    _sync_tree(new)
    if target.is_dir():
        target.rmdir()
    new.rename(target)
    sync_folder(target.parent)


def put_in_place(new: Path, target: Path, *, aside: Path) -> None:
    """Sync a staged folder to disk and move it to `target`; move an existing folder there to `aside`. Where the system can
    swap two names, `target` exists at every moment."""
    _sync_tree(new)
    if not target.exists():
        new.rename(target)
    elif _swap(new, target):
        new.rename(aside)
    else:
        target.rename(aside)
        new.rename(target)
    sync_folder(target.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder. Rename it first, so that a crash leaves no partial folder under its name."""
    trash = staging_path(folder)
    folder.rename(trash)
    sync_folder(folder.parent)
    shutil.rmtree(trash)


def set_aside(path: Path) -> Path:
    """Rename a file or folder to the first free `<name>~<n>`; return the new path."""
    number = 1
    while (target := path.with_name(f"{path.name}~{number}")).exists():
        number += 1
    path.rename(target)
    sync_folder(path.parent)
    return target


def staging_path(target: Path) -> Path:
    """Return a new hidden path next to `target`, on the same file system."""
    return target.with_name(f".{target.name}.{_machine()}{os.getpid():08x}{uuid.uuid4().hex[:12]}")


@cache
def _machine() -> str:
    """Return a hash of the scope of process ids: the machine, its last boot and the process namespace."""
    facts = [platform.node()]
    with suppress(OSError):  # Linux only
        facts.append(str(Path("/proc/self/ns/pid").readlink()))
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def staged_name(path: Path) -> str | None:
    """Return the name of the target that `path` was staged for; None if it is not a staged file or folder."""
    found = _STAGED.fullmatch(path.name)
    return found["name"] if found else None


def leftovers(folder: Path, *, of: Callable[[str], object]) -> list[Path]:
    """Return the staged paths left in `folder` by killed processes, for targets whose name `of` accepts."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if (name := staged_name(path)) is not None and of(name))


def clear_leftovers(folder: Path, *, of: Callable[[str], object]) -> int:
    """Remove the leftovers and return their number. Only the process that holds the targets' lock may call this."""
    found = leftovers(folder, of=of)
    for path in found:
        _remove(path)
    return len(found)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def remove_abandoned(folder: Path) -> None:
    """Remove the paths that killed processes staged in `folder`, and log each."""
    for path in leftovers(folder, of=bool):
        with suppress(OSError):  # removed by another process, or not ours
            if not _is_abandoned(path):
                continue
            files = path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]
            num_bytes = sum(file.lstat().st_size for file in files)
            _remove(path)
            _log.warning("removed  %s (%s), left by a killed process", path, readable_bytes(num_bytes))


def _is_abandoned(path: Path) -> bool:
    """True if the process that staged a path exited; on another machine or before a reboot, if the path is a week old."""
    owner = path.name[-32:]
    if os.name == "nt" or owner[:12] != _machine():  # on Windows, os.kill would end the process
        return time.time() - path.lstat().st_mtime > _OLD_S
    try:
        os.kill(int(owner[12:20], 16), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # the process of another user
        return False
    return False


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that files created, renamed or removed in it survive a power loss."""
    if os.name != "nt":  # Windows cannot sync a folder
        _sync(folder, os.O_RDONLY)


def _sync_tree(root: Path) -> None:
    """Sync a file, or a folder with everything in it."""
    if root.is_file():
        _sync_file(root)
        return
    for folder, _, files in os.walk(root):
        for name in files:
            if not (path := Path(folder, name)).is_symlink():
                _sync_file(path)
        sync_folder(Path(folder))


def _sync_file(path: Path) -> None:
    # Windows syncs only through a writable handle; elsewhere a read-only handle is enough.
    _sync(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _swap(one: Path, other: Path) -> bool:
    """Swap two paths atomically; return False if the system or the file system does not support it."""
    libc = ctypes.CDLL(None, use_errno=True)
    first, second = os.fsencode(one.absolute()), os.fsencode(other.absolute())
    try:
        if sys.platform == "darwin":
            failed = libc.renamex_np(first, second, _SWAP)
        else:
            failed = libc.renameat2(_AT_FDCWD, first, _AT_FDCWD, second, _SWAP)
    except AttributeError:  # the C library lacks the call
        return False
    if not failed:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_SWAP:
        return False
    raise OSError(code, os.strerror(code), str(one))
