"""Print a table that fits the width of the terminal: columns of less interest are left out, long cells are cut."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from crosstune.core.control_characters import printable

GAP = 2
NARROWEST = 8
"""Columns that a cell which is cut keeps at least."""


@dataclass(frozen=True, kw_only=True)
class Column:
    title: str
    cells: Sequence[str]
    right: bool = False
    rank: int = 0
    """Columns of the highest rank are left out first; those of rank 0 never."""
    cuts: bool = False
    """True if its cells may be cut."""

    def width(self) -> int:
        return max(map(cell_len, (self.title, *self.cells)))


def terminal_width() -> int | None:
    """Return the width of the terminal; None if the output is not one, which has no width."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table_lines(columns: Sequence[Column], *, width: int | None) -> list[str]:
    """Return the lines of a table with a head, at most `width` wide as far as its first columns allow."""
    columns = [_printable(column) for column in columns]
    while width is not None and _total(columns, columns) > width and any(column.rank for column in columns):
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


def _total(columns: Sequence[Column], kept: Sequence[Column]) -> int:
    return sum(min(c.width(), 24) if c.cuts else c.width() for c in kept) + GAP * (len(columns) - 1)


def _printable(column: Column) -> Column:
    return Column(
        title=one_line(column.title),
        cells=[one_line(cell) for cell in column.cells],
        right=column.right,
        rank=column.rank,
        cuts=column.cuts,
    )


def one_line(text: str) -> str:
    """Return a text as it can stand in a table: escaped, without line breaks."""
    return printable(text).replace("\n", " ")


def _line(row: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    cells = []
    for text, column, width in zip(row, columns, widths, strict=True):
        shown = text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"
        padding = " " * (width - cell_len(shown))
        cells.append(padding + shown if column.right else shown + padding)
    return (" " * GAP).join(cells).rstrip()
