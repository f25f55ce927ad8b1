"""Open files from outside (regular files only, without blocking, limited in size); measure files and disks."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
from pathlib import Path
from typing import BinaryIO

from crosstune.core.errors import UserError

# A quota or a file-size limit stops a write just as a full disk does.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_ROOM_WORDS = re.compile(
    "|".join(
        [
            *map(os.strerror, sorted(NO_ROOM)),  # safetensors
            r"\d+ requested and \d+ written",  # numpy
            r"Unable to write \d+ bytes to file",  # MLX
            r"PytorchStreamWriter failed writing file|unexpected pos \d+ vs \d+",  # torch
        ]
    )
)
"""Matches library errors caused by a full disk."""
_BLOCK_BYTES = 2**20
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFREG: "a file",
}


class UnreadableFile(UserError):
    """A file is missing, is not a regular file, is too large, or has unexpected contents."""

    problem = "cannot be read"

    def __init__(self, path: Path | str, why: str, *, do: str = "download or copy the file again") -> None:
        super().__init__(f"{path} {self.problem}.", why=f"{why.rstrip('.')}.", do=do)
        self.path = Path(path)

    def short(self) -> str:
        """Return the file name and the reason, for an error about its folder."""
        return f"{self.path.name}: {self.why}"


class MissingFile(UnreadableFile):
    """There is no such file."""


def open_plain(path: Path, *, follow_links: bool = True) -> BinaryIO:
    """Open a regular file for reading; raise UnreadableFile at once for a pipe, a device, a socket or a folder."""
    # Without O_NONBLOCK, opening a named pipe waits for its writer.
    flags = (
        os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    )
    try:
        # The kind is checked before opening too, since opening a device may act on it.
        _check_regular(path, path.stat() if follow_links else path.lstat())
        handle = os.open(path, flags | (0 if follow_links else getattr(os, "O_NOFOLLOW", 0)))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingFile(path, "it is missing", do="check the path") from error
    except OSError as error:
        raise UnreadableFile(path, error.strerror or str(error), do="check the file") from error
    except ValueError as error:  # a NUL character, or characters that the file system cannot encode
        raise UnreadableFile(
            repr(str(path)), f"no file can have this name ({error})", do="check the path"
        ) from error
    file = os.fdopen(handle, "rb")
    try:
        _check_regular(path, os.fstat(handle))
    except UnreadableFile:
        file.close()
        raise
    return file


def read_plain(path: Path, *, limit: int, follow_links: bool = True) -> bytes:
    """Return the contents of a regular file of at most `limit` bytes."""
    with open_plain(path, follow_links=follow_links) as file:
        try:
            data = file.read() if os.fstat(file.fileno()).st_size <= limit else None
        except OSError as error:
            raise UnreadableFile(path, error.strerror or str(error), do="check the file") from error
    if data is not None and len(data) <= limit:
        return data
    raise UnreadableFile(
        path,
        f"it is larger than {readable_bytes(limit)}, the limit for such a file",
        do="check that it is the file you meant",
    )


def read_plain_text(path: Path, *, limit: int) -> str:
    """Return the contents of a UTF-8 text file of at most `limit` bytes."""
    try:
        return read_plain(path, limit=limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableFile(path, not_utf8(error), do="save the file as UTF-8") from error


def not_utf8(error: UnicodeDecodeError) -> str:
    """Describe the first byte of a text that is not UTF-8."""
    return f"it is not UTF-8 text: byte {error.start:,} is 0x{error.object[error.start]:02x}"


def is_file_name(name: str, *, longest_bytes: int = 255) -> bool:
    """Return True if a text can be the name of one file or folder on every system."""
    try:
        length = len(name.encode("utf-8", errors="surrogateescape"))
    except UnicodeEncodeError:
        return False
    plain = not any(character in "/\\" or ord(character) < 32 for character in name)
    return plain and 0 < length <= longest_bytes and name not in (".", "..")


def check_regular_files(folder: Path) -> None:
    """Raise UnreadableFile if a folder contains a pipe, device or socket that a library would open."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise UnreadableFile(folder, error.strerror or str(error), do="check the folder") from error
    for entry in entries:
        path = Path(entry.path)
        try:
            found = path.stat()
        except OSError:  # a dangling link
            continue
        if not stat.S_ISDIR(found.st_mode):
            _check_regular(path, found)


def free_space(folder: Path) -> int:
    """Return the free bytes on the disk of `folder`, even before it exists."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def disk_full_reason(error: BaseException | None) -> str | None:
    """Return the system's message if an error or its cause is a full disk, a quota or a file-size limit."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return error.strerror
        if found := _NO_ROOM_WORDS.search(str(error)):
            return found[0]
        error = error.__cause__ or error.__context__
    return None


def room_advice(full: str | None, other: str) -> str:
    """Return what to do about a failed write with the `disk_full_reason` `full`: free space only if that helps."""
    if full == os.strerror(errno.EFBIG):
        return f"raise the limit on the size of a file (ulimit -f), or {other}"
    return other if full is None else f"free some space, or {other}"


def resume_advice(error: BaseException) -> str:
    """Return what to do about a run that could not write a file."""
    is_limit = getattr(error, "errno", None) == errno.EFBIG
    repair = (
        "raise the limit on the size of a file (ulimit -f)" if is_limit else "free space or repair the disk"
    )
    return f"{repair}, then run it again with --resume auto"


def readable_bytes(count: int) -> str:
    """Format a size for display."""
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


def _check_regular(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise UnreadableFile(
            path, f"it is {_kind(found)}, not a regular file", do="put the file itself there"
        )


def kind_of(path: Path) -> str:
    """Describe the kind of a path that is not a regular file, such as `a folder`."""
    try:
        return _kind(path.stat())
    except OSError:
        return "a broken link" if path.is_symlink() else "missing"


def _kind(found: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(found.st_mode), "a special file")
