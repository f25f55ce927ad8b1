"""Wrap standard output and error: escape control characters, and ensure a slow or closed reader cannot block or kill the run."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import queue
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterable
from typing import Any, TextIO

from crosstune.core.errors import UserError
from crosstune.core.safe_text import printable
from crosstune.process.this_process import in_tracker_thread

MAX_WAITING = 500
"""Maximum number of writes queued for a terminal; further writes are dropped."""
DRAIN_S = 2.0
_READER_GONE = (errno.EPIPE, errno.EIO, errno.ECONNRESET, errno.ENXIO)
_NARROWEST_TEXT = 24
"""Minimum width of the text next to a label; on a narrower terminal it continues below."""
_LABEL = re.compile(r"\s*\S+(?: \S+)*\s{2,}|[a-z]{8} ")
"""The label of a line: words and a gap, or a word that fills the column of eight."""


class Stream:
    """A text stream that escapes control characters, and drops text after a write error (a closed pipe or terminal, a full
    disk) and text printed by trackers."""

    def __init__(self, stream: TextIO, *, keeps_return: bool = False) -> None:
        self.stream = stream
        self.styled = StyledStream(self)
        self.lost = False
        self.failure: OSError | None = None
        """The write error; None if only the reader closed."""
        self._keeps_return = keeps_return
        self._waiting: queue.Queue[bytes] | None = None

    def write(self, text: str) -> int:
        # Progress bars of libraries start each write with a carriage return.
        kept = "\r" if self._keeps_return and text.startswith("\r") else ""
        self.write_styled(kept + printable(text.removeprefix(kept)))
        return len(text)

    def write_styled(self, text: str) -> int:
        """Write text with our own escape sequences."""
        if self.lost or in_tracker_thread():
            return len(text)
        if self._waiting is not None:
            encoded = text.replace("\n", os.linesep).encode(
                self.stream.encoding or "utf-8", "backslashreplace"
            )
            with contextlib.suppress(queue.Full):  # nobody reads it
                self._waiting.put_nowait(encoded)
        else:
            try:
                self.stream.write(text)
            except OSError as error:
                self._drop(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if not self.lost and self._waiting is None:
            try:
                self.stream.flush()
            except OSError as error:
                self._drop(error)

    def unblock(self) -> None:
        """Write to a terminal from a thread from now on, so that a stalled terminal (Ctrl-S, a lost connection) does not block
        the run."""
        if self._waiting is None and self.stream.isatty():
            self.flush()
            self._waiting = queue.Queue(maxsize=MAX_WAITING)
            # A separate descriptor: a thread blocked in Python's buffer would block the exit of the process.
            arguments = (os.dup(self.stream.fileno()), self._waiting)
            threading.Thread(target=_write_all, args=arguments, name="terminal", daemon=True).start()

    def drain(self) -> None:
        """Write all queued text, but give up after two seconds."""
        end = time.monotonic() + DRAIN_S
        while self._waiting is not None and self._waiting.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.005)
        self.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _drop(self, error: OSError) -> None:
        """Redirect the file descriptor to the null device, including for libraries and child processes."""
        self.lost = True
        self.failure = None if error.errno in _READER_GONE else error
        with contextlib.suppress(OSError):  # a stream without a descriptor
            null = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(null, self.stream.fileno())
            finally:
                os.close(null)


class StyledStream:
    """A view of a stream that keeps escape sequences."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write_styled(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def styled(stream: Any) -> Any:
    """Return the view of a stream that keeps escape sequences."""
    return stream.styled if isinstance(stream, Stream) else stream


def _write_all(descriptor: int, waiting: queue.Queue[bytes]) -> None:
    lost = False
    while True:
        text = waiting.get()
        while text and not lost:
            try:
                text = text[os.write(descriptor, text) :]
            except OSError:  # the terminal was closed
                lost = True
        waiting.task_done()


def open_closed_streams() -> None:
    """Open the null device in place of standard streams that were closed (`>&-`). Otherwise they are None, and the next
    opened file gets their descriptor: libraries and child processes would print into it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        null = os.open(os.devnull, os.O_WRONLY if number else os.O_RDONLY)  # takes the lowest free descriptor
        os.set_inheritable(null, null == number)
        setattr(sys, name, os.fdopen(null, "w" if number else "r", encoding="utf-8", errors="replace"))


def wrap_output() -> None:
    """Wrap this process's standard output and standard error, once."""
    open_closed_streams()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            # Escape characters missing in the terminal's encoding, and file names that are not UTF-8.
            stream.reconfigure(errors="backslashreplace")
        if stream is not None and not isinstance(stream, Stream):
            setattr(sys, name, Stream(stream, keeps_return=name == "stderr"))


def drain_output() -> None:
    """Finish writing; raise a UserError if standard output could not be written."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Stream):
            stream.drain()
    if isinstance(sys.stdout, Stream) and sys.stdout.failure is not None:
        failure, sys.stdout.failure = sys.stdout.failure, None
        raise UserError("Standard output could not be written.", why=str(failure))


def fold(line: str, width: int) -> list[str]:
    """Wrap a line; align further lines with the text after a label (`saved    checkpoint ...`), or indent them."""
    indent = min(len(line) - len(line.lstrip()) + 2, max(0, width - _NARROWEST_TEXT))
    label = _LABEL.match(line)
    if label is not None and label.end() <= width - _NARROWEST_TEXT:
        indent = label.end()
    return textwrap.wrap(
        line, max(1, width), subsequent_indent=" " * indent, break_on_hyphens=False, tabsize=4
    ) or [""]


def fold_help(text: str) -> str:
    """Wrap a help text to the width of the terminal, if printed on one."""
    if not sys.stdout.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(part for line in text.split("\n") for part in fold(line, width))
