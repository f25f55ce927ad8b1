"""Print lines and tables, wrapped to the width of a terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from crosstune.cli.terminal.streams import StyledStream, fold, styled
from crosstune.core.safe_text import printable

WARNING, ERROR, GOOD, QUIET, STRONG = "yellow", "bold red", "green", "dim", "bold"


class EscapingConsole(Console):
    """A rich console that escapes control characters."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # rich removes carriage returns from text, so such a segment was passed as `end`.
            if segment.control or segment.text == "\r":
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


class Output:
    """A console with colors by rich's rules: none in a file, with NO_COLOR, or with TERM=dumb."""

    def __init__(self, stream: TextIO | None = None) -> None:
        # Plain text in a notebook: rich would display an HTML element per line.
        self.console = EscapingConsole(
            file=styled(stream or sys.stderr),
            highlight=False,
            soft_wrap=True,
            force_jupyter=False,
        )

    @property
    def is_terminal(self) -> bool:
        """True if a line can be rewritten in place."""
        return self.console.is_terminal and not self.console.is_dumb_terminal

    def drain(self) -> None:
        """Wait up to two seconds for queued text."""
        if isinstance(self.console.file, StyledStream):
            self.console.file.drain()

    def line(self, text: str, *, style: str | None = None) -> None:
        """Print text line by line."""
        # Escape before wrapping, since an escape is longer than its character; rich would silently drop some.
        for line in printable(text).split("\n"):
            folded = fold(line, self.console.width) if self.console.is_terminal else [line]
            self.console.print(Text("\n".join(folded), style=style or ""))


def print_line(text: str, *, style: str | None = None) -> None:
    """Print text on standard output."""
    Output(sys.stdout).line(text, style=style)


def print_error(lines: Sequence[str]) -> None:
    """Print an error on standard error: the first line of each problem in red, details below."""
    output = Output()
    for line in lines:
        indented = line.startswith("  ")
        output.line(line if indented else f"crosstune: {line}", style=None if indented else ERROR)


GAP = 2
NARROWEST = 8
"""Minimum width of a cut cell."""


@dataclass(frozen=True, kw_only=True)
class Column:
    title: str
    cells: Sequence[str]
    right: bool = False
    rank: int = 0
    """Columns with the highest rank are omitted first, columns with rank 0 never."""
    cuts: bool = False
    """True if its cells may be cut."""

    def width(self) -> int:
        return max(map(cell_len, (self.title, *self.cells)))


def terminal_width() -> int | None:
    """Return the width of the terminal; None if the output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table_lines(columns: Sequence[Column], *, width: int | None) -> list[str]:
    """Return the lines of a table with a header, at most `width` wide if its columns of rank 0 allow."""
    columns = [
        replace(column, title=one_line(column.title), cells=[one_line(cell) for cell in column.cells])
        for column in columns
    ]
    while width is not None and _total_width(columns) > width and any(column.rank for column in columns):
        last = max(column.rank for column in columns)
        columns = [column for column in columns if column.rank != last]
    widths = [column.width() for column in columns]
    if width is not None:
        for place in sorted(range(len(columns)), key=lambda place: -widths[place]):
            spare = sum(widths) + GAP * (len(widths) - 1) - width
            if columns[place].cuts and spare > 0:
                widths[place] = max(NARROWEST, widths[place] - spare)
    rows = [[column.title for column in columns]]
    rows += [list(row) for row in zip(*(column.cells for column in columns), strict=True)]
    return [_line(row, columns, widths) for row in rows]


def _total_width(columns: Sequence[Column]) -> int:
    return sum(min(c.width(), 24) if c.cuts else c.width() for c in columns) + GAP * (len(columns) - 1)


def one_line(text: str) -> str:
    """Return the text of a table cell: escaped, without line breaks."""
    return printable(text).replace("\n", " ")


def _line(row: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    cells = []
    for text, column, width in zip(row, columns, widths, strict=True):
        shown = text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"
        padding = " " * (width - cell_len(shown))
        cells.append(padding + shown if column.right else shown + padding)
    return (" " * GAP).join(cells).rstrip()
