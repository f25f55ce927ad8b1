"""Fold lines at words to the width of a terminal."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence

NARROWEST_TEXT = 24
"""Columns that the text beside a label needs; on a narrower terminal it continues below the label instead."""

_LABEL = re.compile(r"\s*\S+(?: \S+)*\s{2,}|[a-z]{8} ")
"""The start of a line that continued lines are aligned after: words and a gap, or a label that fills its column of eight."""


def fold(line: str, width: int) -> list[str]:
    """Break a line at spaces so that no part is wider than `width` columns, except a word that is wider itself.

    Continued parts are aligned with the text after a label (`saved    checkpoint ...`), or indented by two.
    """
    if _cells(line) <= width:
        return [line]
    start = re.match(r"\s*", line)
    assert start is not None
    indent = min(len(start.group()) + 2, max(0, width - NARROWEST_TEXT))
    label = _LABEL.match(line)
    if label is not None and label.end() <= width - NARROWEST_TEXT:
        indent = label.end()
    return _fill(re.findall(r"\s*\S+", line), width, indent=indent)


def _fill(words: Sequence[str], width: int, *, indent: int) -> list[str]:
    """Put words, each with the spaces before it, on as few lines as they need."""
    lines = [words[0]] if words else [""]
    for word in words[1:]:
        if _cells(lines[-1]) + _cells(word) <= width:
            lines[-1] += word
        else:
            bare = word.lstrip()
            # A word that does not fit beside the indentation may fit without it.
            room = max(0, min(indent, width - _cells(bare)))
            lines.append(" " * room + bare)
    return lines


def _cells(text: str) -> int:
    """Return the number of columns that a text takes."""
    if text.isascii():  # most texts: `--help` need not import rich
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def fold_help(text: str) -> str:
    """Return a help text folded to the width of the terminal; whole if it is not printed on one."""
    if not sys.stdout.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(part for line in text.split("\n") for part in fold(line, width))
