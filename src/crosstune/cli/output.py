"""Print lines for people: folded at words to the width of a terminal, whole everywhere else."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

WARNING, ERROR, GOOD, QUIET, STRONG = "yellow", "bold red", "green", "dim", "bold"
NARROWEST_TEXT = 24
"""Columns that the text beside a label needs; on a narrower terminal it continues below the label instead."""

_LABEL = re.compile(r"\s*\S+(?: \S+)*\s{2,}|[a-z]{8} ")
"""What a continued line is aligned after: words and a gap, or a label that fills its column of eight."""


class Output:
    """A stream for people. Colours follow rich's rules: none in a file, with NO_COLOR, or with TERM=dumb."""

    def __init__(self, stream: TextIO | None = None) -> None:
        # A notebook gets plain text: rich would display an HTML element for every line.
        self.console = Console(
            file=stream or sys.stderr, highlight=False, soft_wrap=True, force_jupyter=False
        )

    @property
    def is_terminal(self) -> bool:
        """Whether a line can be rewritten in place."""
        return self.console.is_terminal and not self.console.is_dumb_terminal

    def line(self, text: str, *, style: str | None = None, label_style: str | None = None) -> None:
        """Print a text line by line. `label_style` is for the first word of each line alone."""
        for line in text.split("\n"):
            folded = fold(line, self.console.width) if self.console.is_terminal else [line]
            printed = Text("\n".join(folded), style=style or "")
            if label_style is not None:
                printed.stylize(label_style, 0, len(line) - len(line.lstrip()) + len(line.split(" ")[0]))
            self.console.print(printed)


def print_line(text: str, *, style: str | None = None) -> None:
    """Print a text on standard output."""
    Output(sys.stdout).line(text, style=style)


def fold(line: str, width: int) -> list[str]:
    """Break a line at spaces so that no part is wider than `width` columns, except a word that is wider itself.

    Continued parts are aligned with the text after a label (`saved    checkpoint ...`), or indented by two.
    """
    if cell_len(line) <= width:
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
        if cell_len(lines[-1]) + cell_len(word) <= width:
            lines[-1] += word
        else:
            bare = word.lstrip()
            # A word that does not fit beside the indentation may fit without it.
            room = max(0, min(indent, width - cell_len(bare)))
            lines.append(" " * room + bare)
    return lines
