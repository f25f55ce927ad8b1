"""Escape control characters in everything that the command line prints."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import NoneType
from typing import Any, TextIO

from crosstune.core.control_characters import printable


class _EscapingStream:
    """A text stream that escapes what is written to it."""

    def __init__(self, raw: TextIO, *, keeps_return: bool) -> None:
        self.raw = raw
        self._keeps_return = keeps_return

    def write(self, text: str) -> int:
        kept = "\r" if self._keeps_return and text.startswith("\r") else ""
        self.raw.write(kept + printable(text.removeprefix(kept)))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def escape_output() -> None:
    """Escape what this process prints from now on."""
    if not isinstance(sys.stdout, (_EscapingStream, NoneType)):
        sys.stdout = _EscapingStream(sys.stdout, keeps_return=False)
    if not isinstance(sys.stderr, (_EscapingStream, NoneType)):
        # The progress bars of libraries return to the start of their line with each write.
        sys.stderr = _EscapingStream(sys.stderr, keeps_return=True)


def raw_stream(stream: Any) -> Any:
    """Return the stream to which escape sequences of our own can be written."""
    return stream.raw if isinstance(stream, _EscapingStream) else stream
