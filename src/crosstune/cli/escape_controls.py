"""Escape control characters in everything that the command line prints.

Prompts, names, errors and generated text come from data and models. Raw, they could move the cursor, write to the
clipboard or reverse the order of letters. Lines and tabs stay.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from types import NoneType
from typing import Any, TextIO

_KEPT = "\n\t"
# C0, DEL and C1; what embeds, overrides or isolates the direction of writing; byte order marks; invisible tags; and halves
# of characters.
_CONTROLS = (
    *range(0x20),
    *range(0x7F, 0xA0),
    0xFEFF,
    *range(0xE0000, 0xE0080),
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),
)
_ESCAPED: Mapping[int, str] = {code: ascii(chr(code))[1:-1] for code in _CONTROLS if chr(code) not in _KEPT}
_ESCAPED_IN_JSON: Mapping[int, str] = {
    code: json.dumps(chr(code))[1:-1] for code in _CONTROLS if code >= 0x20
}


def printable(text: str) -> str:
    """Return the text with control characters as in Python's escapes: `\\x1b` for ESC."""
    return text.translate(_ESCAPED)


def printable_json(text: str) -> str:
    """Return JSON with the control characters escaped that its encoder leaves raw."""
    return text.translate(_ESCAPED_IN_JSON)


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
