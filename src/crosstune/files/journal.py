"""Keep the finished rows of a long command next to its output, so that the same command continues after being killed."""

from __future__ import annotations

import hashlib
import itertools
import os
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from crosstune.core.errors import UserError
from crosstune.files.atomic_files import set_aside
from crosstune.files.json_files import parse_json, to_json
from crosstune.files.outputs import is_stream
from crosstune.files.plain_files import MissingFile, disk_full_reason, open_plain, room_advice

SUFFIX = ".partial"
_FORMAT = 2


class Journal:
    """The rows of an unfinished output: `NAME.partial`, the key of the request first, then a line for each row: its CRC-32,
    which begins with the line's number, and its JSON text.

    `rows` has the rows of an earlier process with an equal request, in whole blocks. A file of a different request is set
    aside. Without an output, or with a pipe as output, nothing is kept.
    """

    def __init__(
        self, output: Path | None, request: Any, *, say: Callable[[str], None], block: int = 1
    ) -> None:
        self.rows: list[Any] = []
        self.path = None if output is None or is_stream(output) else output.with_name(output.name + SUFFIX)
        self._key = hashlib.sha256(to_json([_FORMAT, request]).encode()).hexdigest()
        self._say, self.block = say, block
        self._file: BinaryIO | None = None

    def __enter__(self) -> Journal:
        if self.path is None:
            return self
        self._file = self._open()
        num_bytes = self._read()
        if not num_bytes and self._file.seek(0, os.SEEK_END):
            self._file.close()
            self._say(f"{set_aside(self.path)} keeps the rows of a different request")
            self._file = self._open()
        if self.rows:
            self._say(f"continues after {len(self.rows):,} finished rows in {self.path}")
        self._file.truncate(num_bytes)
        if not num_bytes:
            try:
                self._write([self._key], first=0)
            except UserError:
                self.__exit__(None, None, None)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with suppress(OSError):  # after a failed write, closing fails as well
                self._file.close()
            if not self.rows:
                self.remove()

    def add(self, rows: Iterable[Any]) -> None:
        """Add finished rows."""
        rows = list(rows)
        if self._file is not None:
            self._write(rows, first=1 + len(self.rows))
        self.rows += rows

    def remove(self) -> None:
        """Remove the file: the output is complete."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _open(self) -> BinaryIO:
        """Open and lock the file; raise a UserError if it is not a regular file, or if another process writes it."""
        assert self.path is not None
        with suppress(MissingFile), open_plain(self.path, follow_links=False):
            pass
        try:
            file = self.path.open("a+b")
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written.",
                why=f"{disk_full_reason(error) or error.strerror}.",
                do="choose a different output",
            ) from error
        try:
            lock_file(file)
        except BlockingIOError:
            file.close()
            raise UserError(
                f"{self.path} is in use.",
                why="another process is writing the same output.",
                do="wait for it, or choose a different output",
            ) from None
        return file

    def _read(self) -> int:
        """Read the rows of an earlier process; return the number of valid bytes, 0 for a different request."""
        assert self._file is not None
        self._file.seek(0)
        valid, num_bytes, complete, found = 0, 0, 0, list[Any]()
        for number, line in enumerate(self._file):
            row = _read_line(line, number)
            if row is None or (number == 0 and row != self._key):  # the last line may be incomplete
                break
            found += [row] if number else []
            num_bytes += len(line)
            if len(found) % self.block == 0:
                valid, complete = num_bytes, len(found)
        self.rows = found[:complete]
        return valid

    def _write(self, rows: list[Any], *, first: int) -> None:
        assert self._file is not None
        try:
            self._file.write(b"".join(map(_write_line, rows, itertools.count(first))))
            self._file.flush()
        except OSError as error:
            full = disk_full_reason(error)
            raise UserError(
                f"{self.path} cannot be written.",
                why=f"{full or error.strerror}; {len(self.rows):,} rows are finished.",
                do=room_advice(
                    full, "make the folder writable; then run the same command again: it continues"
                ),
            ) from error


def _write_line(row: Any, number: int) -> bytes:
    text = to_json(row).encode()
    return b"%08x %b\n" % (zlib.crc32(text, number), text)


def _read_line(line: bytes, number: int) -> Any:
    """Return the row of a line; None if the line is incomplete, damaged or in a different place."""
    crc, _, text = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or crc != b"%08x" % zlib.crc32(text, number):
        return None
    try:
        return parse_json(text)
    except ValueError:
        return None


def file_stamps(*paths: Path | None) -> list[list[Any]]:
    """Return name, size and modification time of files, including files in folders: a cheap identity for a request."""
    stamps: list[list[Any]] = []
    for path in paths:
        files = sorted(path.iterdir()) if path is not None and path.is_dir() else [path]
        for file in files:
            if file is not None and file.is_file():
                found = file.stat()
                stamps.append([str(file.absolute()), found.st_size, found.st_mtime_ns])
    return stamps


def lock_file(file: BinaryIO) -> None:
    """Lock a file until it is closed or the process exits; raise BlockingIOError if another process holds it."""
    if os.name == "nt":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        pass
