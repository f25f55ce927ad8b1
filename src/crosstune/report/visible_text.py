"""Make the control characters of data and models visible, so that they cannot change how a page reads."""

from __future__ import annotations

_CONTROLS = [code for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"]
_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_TABLE = {code: f"\\x{code:02x}" for code in _CONTROLS}
_TABLE |= {code: f"\\u{code:04x}" for code in (*_BIDI, 0x2028, 0x2029, 0xFEFF)}


def visible(text: str) -> str:
    """Return a text with an escape for each control character, except tabs and line ends."""
    return text.replace("\r\n", "\n").translate(_TABLE)
