"""`crosstune runs`, `compare` and `report`: list runs, compare them, write a run's page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from crosstune.cli.arguments import (
    Line,
    Parser,
    at_least,
    print_result,
    read_path,
    read_path_or_name,
    read_run,
)
from crosstune.cli.terminal.figures import duration, figure, size
from crosstune.cli.terminal.output import QUIET, STRONG, WARNING, Column, table_lines, terminal_width
from crosstune.files.outputs import check_output

if TYPE_CHECKING:
    from crosstune.report.comparison import Comparison, Row
    from crosstune.report.run_list import ListedRun

EXAMPLES = """examples:
  crosstune runs
  crosstune runs --output_dir experiments --last 100
  crosstune runs --status running --json

A run is `running` while a process holds its lock, and `killed` if none does and no outcome is recorded. A narrow terminal
omits less important columns; --json has all."""

STATUSES = ("running", "finished", "stopped", "failed", "killed", "damaged", "unknown")
_STYLES = {"running": "cyan", "failed": "red", "damaged": "red", "killed": "yellow", "stopped": "yellow"}

COMPARE_EXAMPLES = """examples:
  crosstune compare demo low-lr
  crosstune compare runs/demo elsewhere/demo --out compare.html     (one page with overlaid curves)
  crosstune compare demo low-lr full --json

Specify runs by folder, or by name in --output_dir. `*` marks the best value of a row."""


def make_parser() -> Parser:
    parser = Parser("runs", description="List runs, the newest first.", epilog=EXAMPLES)
    add = parser.add_argument
    add("--output_dir", type=read_path, default=Path("runs"), help="runs folder (default runs)")
    add("--last", type=at_least(1), default=30, help="number of runs to list (default 30)")
    add("--all", action="store_true", help="list all runs")
    add("--status", choices=STATUSES, help="list only runs with this status")
    return parser


def run(words: Sequence[str]) -> int:
    own = make_parser().parse_args(list(words))

    from crosstune.report.run_list import read_listed, run_folders

    folders = run_folders(own.output_dir)
    most = len(folders) if own.all else int(own.last)
    listed = list["ListedRun"]()
    for folder, changed in folders:
        if len(listed) == most:
            break
        found = read_listed(folder, changed=changed)
        if own.status in (None, found.status):
            listed.append(found)
    lines = _list_lines(listed, parent=own.output_dir, num_found=len(folders))
    return print_result([each.to_json() for each in listed], lines, as_json=own.json)


def _list_lines(listed: Sequence[ListedRun], *, parent: Path, num_found: int) -> Iterator[Line]:
    if not listed:
        yield f"There are no{' such' * bool(num_found)} runs in {parent}."
        return
    head, *lines = run_lines(listed, width=terminal_width())
    yield head, QUIET
    yield from ((line, _STYLES.get(each.status)) for line, each in zip(lines, listed, strict=True))
    for each in listed:
        yield from ((f"damaged  {each.name}: {problem}", WARNING) for problem in each.problems)
    if len(listed) < num_found:
        yield f"{len(listed)} of {num_found:,} runs; --all lists all", QUIET


def run_lines(listed: Sequence[ListedRun], *, width: int | None) -> list[str]:
    """Return the table of runs with its header."""

    def column(title: str, cell: Callable[[ListedRun], str], *, rank: int = 0, right: bool = True) -> Column:
        cells, cuts = [cell(each) for each in listed], title in ("run", "model")
        return Column(title=title, cells=cells, rank=rank, right=right, cuts=cuts)

    columns = [
        column("run", lambda each: each.name, right=False),
        column("status", lambda each: each.status, right=False),
        column("recipe", lambda each: each.recipe, rank=7, right=False),
        column("model", lambda each: each.model, rank=5, right=False),
        column("method", lambda each: each.method, rank=6, right=False),
        column("steps", _steps, rank=2),
        column("loss", lambda each: _figure(each.loss), rank=3),
        column("best eval", _best, rank=1),
        column("tok/s", lambda each: _figure(each.tokens_per_s), rank=4),
        column("memory", lambda each: size(m) if (m := each.peak_memory_bytes) else "-", rank=8),
        column("age", lambda each: _age(each.age_s)),
    ]
    return table_lines(columns, width=width)


def _steps(each: ListedRun) -> str:
    return f"{each.steps:,}" if each.num_steps in (None, each.steps) else f"{each.steps:,}/{each.num_steps:,}"


def _best(each: ListedRun) -> str:
    return "-" if each.best_eval is None else f"{_figure(each.best_eval)} @{each.best_step}"


def _figure(value: float | None) -> str:
    return "-" if value is None else figure(value)


def _age(seconds: float) -> str:
    return duration(seconds) if seconds < 48 * 3600 else f"{seconds / 86400:.0f}d"


def make_parser_compare() -> Parser:
    parser = Parser("compare", description="Show the differences between runs.", epilog=COMPARE_EXAMPLES)
    add = parser.add_argument
    add("runs", nargs="*", type=read_path_or_name, metavar="RUN", help="two or more runs")
    add("--output_dir", type=read_path, default=Path("runs"), help="runs folder (default runs)")
    add("--out", type=read_path, metavar="FILE", help="also write a page with overlaid curves")
    return parser


def run_compare(words: Sequence[str]) -> int:
    own = make_parser_compare().parse_args(list(words))
    if own.out is not None:
        from crosstune.report.template import MARK

        check_output(own.out, option="out", mark=MARK)

    from crosstune.report.comparison import compare_runs, write_comparison

    found = compare_runs(own.runs, parent=own.output_dir)
    page = write_comparison(found, own.out) if own.out is not None else None
    lines = [*comparison_lines(found, width=terminal_width()), *([f"page     {page}"] if page else [])]
    return print_result(found.to_json() | ({"page": str(page)} if page else {}), lines, as_json=own.json)


def comparison_lines(found: Comparison, *, width: int | None) -> Iterator[Line]:
    """Yield the lines of a comparison with their styles."""
    yield from ((f"note     {note}", WARNING) for note in found.notes)
    yield "Results", STRONG
    yield from _table(found.results, found.names, width=width)
    yield ""
    yield "Differences", STRONG
    if found.options:
        yield from _table(found.options, found.names, width=width)
    else:
        yield "nothing: the same options, data, model and machine", QUIET


def _table(rows: Sequence[Row], names: Sequence[str], *, width: int | None) -> Iterator[Line]:
    """Yield a table with a column per run, or a list if the columns do not fit."""
    cells = [
        [row.cells[place].text + " *" * (row.best == place) for row in rows] for place in range(len(names))
    ]
    columns = [Column(title="", cells=[row.label for row in rows])]
    columns += [Column(title=name, cells=column) for name, column in zip(names, cells, strict=True)]
    if width is None or sum(column.width() for column in columns) + 2 * len(names) <= width:
        head, *lines = table_lines(columns, width=width)
        yield head, QUIET
        yield from lines
        return
    wide = max(map(len, names))
    for place, row in enumerate(rows):
        yield row.label, QUIET
        yield from (f"  {name:<{wide}}  {column[place]}" for name, column in zip(names, cells, strict=True))


def make_parser_report() -> Parser:
    parser = Parser(
        "report",
        description="Write report.html from the files of a run, finished or not.",
        epilog="examples:\n  crosstune report runs/demo\n  crosstune report runs/demo --json",
    )
    parser.add_argument("run", type=read_run, help="the run, by folder or by name in runs")
    return parser


def run_report(words: Sequence[str]) -> int:
    own = make_parser_report().parse_args(list(words))

    from crosstune.report import write_report

    path = write_report(Path(own.run).expanduser())
    return print_result({"report": str(path)}, [str(path)], as_json=own.json)
