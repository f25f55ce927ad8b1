"""`crosstune compare`: show what differs between runs, in the terminal and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from crosstune.cli.arguments import Parser, print_json, read_path, read_path_or_name
from crosstune.core.errors import EXIT_DONE

if TYPE_CHECKING:
    from crosstune.report.comparison import Comparison, Row

EXAMPLES = """examples:
  crosstune compare demo low-lr
  crosstune compare runs/demo elsewhere/demo --out compare.html     (one page with overlaid curves)
  crosstune compare demo low-lr full --json

A run is given by its folder, or by its name in --output_dir. `*` marks the best value of a row."""


def make_parser() -> Parser:
    parser = Parser("compare", description="Show what differs between runs.", epilog=EXAMPLES)
    parser.add_argument("runs", nargs="*", type=read_path_or_name, metavar="RUN", help="two or more runs")
    parser.add_argument(
        "--output_dir", type=read_path, default=Path("runs"), help="the folder of the runs (default runs)"
    )
    parser.add_argument(
        "--out", type=read_path, metavar="FILE", help="also write a page with overlaid curves"
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    return parser


def run(words: Sequence[str]) -> int:
    own = make_parser().parse_args(list(words))

    from crosstune.cli.columns import terminal_width
    from crosstune.cli.output import QUIET, STRONG, WARNING, print_line
    from crosstune.report.comparison import compare_runs, write_comparison

    found = compare_runs(own.runs, parent=own.output_dir)
    page = write_comparison(found, own.out) if own.out is not None else None
    if own.json:
        print_json(found.to_json() | ({"page": str(page)} if page else {}))
        return EXIT_DONE
    styles = {"head": STRONG, "note": WARNING, "quiet": QUIET}
    for line, kind in comparison_lines(found, width=terminal_width()):
        print_line(line, style=styles.get(kind))
    if page is not None:
        print_line(f"page     {page}")
    return EXIT_DONE


def comparison_lines(found: Comparison, *, width: int | None) -> Iterator[tuple[str, str]]:
    """Yield the lines of a comparison, each with its kind: head, row, note or quiet."""
    for note in found.notes:
        yield f"note     {note}", "note"
    yield "Results", "head"
    yield from _table(found.results, found.names, width=width)
    yield "", "row"
    yield "What differs", "head"
    if found.options:
        yield from _table(found.options, found.names, width=width)
    else:
        yield "nothing: the same options, data, model and machine", "quiet"


def _table(rows: Sequence[Row], names: Sequence[str], *, width: int | None) -> Iterator[tuple[str, str]]:
    """Yield a table with a column for each run; below one another where the columns do not fit."""
    from crosstune.cli.columns import Column, one_line, table_lines

    names = [one_line(name) for name in names]
    cells = [[_cell(row, place) for row in rows] for place in range(len(names))]
    columns = [Column(title="", cells=[row.label for row in rows])]
    columns += [Column(title=name, cells=column) for name, column in zip(names, cells, strict=True)]
    needed = sum(column.width() for column in columns) + 2 * len(names)
    if width is None or needed <= width:
        for place, line in enumerate(table_lines(columns, width=width)):
            yield line, "row" if place else "quiet"
        return
    wide = max(map(len, names))
    for place, row in enumerate(rows):
        yield row.label, "quiet"
        for name, column in zip(names, cells, strict=True):
            yield f"  {name:<{wide}}  {column[place]}", "row"


def _cell(row: Row, place: int) -> str:
    return row.cells[place].text + (" *" if row.best == place else "")
