"""Fold lines at words to the width of a terminal."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator

NARROWEST_TEXT = 24
"""Columns that the text beside a label needs; on a narrower terminal it continues below the label instead."""

_LABEL = re.compile(r"\s*\S+(?: \S+)*\s{2,}|[a-z]{8} ")
"""The start of a line that continued lines are aligned after: words and a gap, or a label that fills its column of eight."""
_JOINTS = re.compile(r"[^/\\,;:=&|_.-]*[/\\,;:=&|_.-]+|[^/\\,;:=&|_.-]+")
"""A part of a long word, such as a path or an address, with the character that it can be broken after."""


def fold(line: str, width: int) -> list[str]:
    """Break a line so that no part is wider than `width` columns: at spaces, a longer word at its separators, and a
    longer part of one wherever the line ends.

    Continued parts are aligned with the text after a label (`saved    checkpoint ...`), or indented by two.
    """
    if _cells(line) <= width or width < 1:
        return [line]
    start = re.match(r"\s*", line)
    assert start is not None
    indent = min(len(start.group()) + 2, max(0, width - NARROWEST_TEXT))
    label = _LABEL.match(line)
    if label is not None and label.end() <= width - NARROWEST_TEXT:
        indent = label.end()
    lines = [""]
    for word in re.findall(r"\s*\S+", line):
        for piece in _pieces(word, width, indent=indent):
            bare = piece.lstrip()
            if _cells(lines[-1]) + _cells(piece) <= width:
                lines[-1] += piece
            elif lines[-1]:
                # A word that does not fit beside the indentation may fit without it.
                lines.append(" " * max(0, min(indent, width - _cells(bare))) + bare)
            else:
                lines[-1] = bare
    return lines


def _pieces(word: str, width: int, *, indent: int) -> Iterator[str]:
    """Yield a word with the spaces before it; one that is wider than a line in pieces that fit beside the indentation."""
    bare = word.lstrip()
    if _cells(bare) <= width:
        yield word
        return
    spaces, room = word[: len(word) - len(bare)], width - indent
    for part in _JOINTS.findall(bare):
        while _cells(part) > room:
            cut = _fitting(part, room)
            yield spaces + part[:cut]
            spaces, part = "", part[cut:]
        if part:
            yield spaces + part
        spaces = ""


def _fitting(text: str, room: int) -> int:
    """Return how many characters fit into `room` columns, at least one."""
    taken = 1
    while taken < len(text) and _cells(text[: taken + 1]) <= room:
        taken += 1
    return taken


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
