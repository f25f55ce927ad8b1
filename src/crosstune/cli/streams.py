"""Keep a command running when the reader of its output is gone."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from crosstune.cli.escape_controls import escape_output, raw_stream
from crosstune.core.errors import UserError

_READER_GONE = (errno.EPIPE, errno.EIO, errno.ECONNRESET, errno.ENXIO)


class LastingStream:
    """A text stream that goes silent when it cannot be written any more: a closed pipe or terminal, a full disk.

    A training has its record on disk; losing the terminal must not end it.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.lost = False
        self.failure: OSError | None = None
        """The error that lost it; None if its reader just went away, since then nobody misses the text."""

    def write(self, text: str) -> int:
        if not self.lost:
            try:
                return self.stream.write(text)
            except OSError as error:
                self._drop(error)
        return len(text)

    def flush(self) -> None:
        if not self.lost:
            try:
                self.stream.flush()
            except OSError as error:
                self._drop(error)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _drop(self, error: OSError) -> None:
        """Point the file descriptor at the null device, so that libraries and child processes write there too."""
        self.lost = True
        self.failure = None if error.errno in _READER_GONE else error
        with contextlib.suppress(OSError):  # a stream without a descriptor has nothing to redirect
            null = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(null, self.stream.fileno())
            finally:
                os.close(null)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Replace standard output and standard error with streams that outlive their readers; raise at the end when the
    results on standard output could not be written, such as to a full disk."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (None if stream is None else _lasting(raw_stream(stream)) for stream in before)
    escape_output()  # above the lasting streams: our own styles are written to those
    try:
        yield
    finally:
        written = raw_stream(sys.stdout)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before
    if isinstance(written, LastingStream) and written.failure is not None:
        raise UserError("Standard output could not be written.", why=str(written.failure))


def _lasting(stream: Any) -> LastingStream:
    return stream if isinstance(stream, LastingStream) else LastingStream(stream)
