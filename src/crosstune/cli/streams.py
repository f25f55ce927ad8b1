"""Keep a command running when the reader of its output is gone."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class LastingStream:
    """A text stream that goes silent when it cannot be written any more: a closed pipe or terminal, a full disk.

    A training has its record on disk; losing the terminal must not end it.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.lost = False

    def write(self, text: str) -> int:
        if not self.lost:
            try:
                return self.stream.write(text)
            except OSError:
                self._drop()
        return len(text)

    def flush(self) -> None:
        if not self.lost:
            try:
                self.stream.flush()
            except OSError:
                self._drop()

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _drop(self) -> None:
        """Point the file descriptor at the null device, so that libraries and child processes write there too."""
        self.lost = True
        with contextlib.suppress(OSError):  # a stream without a descriptor has nothing to redirect
            null = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(null, self.stream.fileno())
            finally:
                os.close(null)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Replace standard output and standard error with streams that outlive their readers."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (
        stream if stream is None or isinstance(stream, LastingStream) else LastingStream(stream)
        for stream in before
    )
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before
