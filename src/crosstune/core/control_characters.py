"""Escape control characters in text that people look at, in a terminal, a file or a page.

Prompts, names, errors and generated text come from data and models. Raw, they could move the cursor, write to the
clipboard or reverse the order of letters. Lines and tabs stay.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

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
