"""`crosstune runs`: list past and running runs with their figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from crosstune.cli.arguments import Parser, at_least, print_json, read_path
from crosstune.cli.units import duration, figure, size
from crosstune.core.errors import EXIT_DONE

if TYPE_CHECKING:
    from crosstune.report.run_list import ListedRun

EXAMPLES = """examples:
  crosstune runs
  crosstune runs --output_dir experiments --last 100
  crosstune runs --status running --json

A run is `running` while a process holds its lock, and `killed` where none does and no end is recorded. On a narrow
terminal the columns of less interest are left out; --json has them all."""

STATUSES = ("running", "finished", "stopped", "failed", "killed", "damaged", "unknown")
_STYLES = {
    "running": "cyan",
    "failed": "red",
    "damaged": "red",
    "killed": "yellow",
    "stopped": "yellow",
}


def make_parser() -> Parser:
    parser = Parser("runs", description="List runs, the newest first.", epilog=EXAMPLES)
    parser.add_argument(
        "--output_dir", type=read_path, default=Path("runs"), help="the folder of the runs (default runs)"
    )
    parser.add_argument("--last", type=at_least(1), default=30, help="how many to list (default 30)")
    parser.add_argument("--all", action="store_true", help="list all of them")
    parser.add_argument("--status", choices=STATUSES, help="list only runs of this status")
    parser.add_argument("--json", action="store_true", help="print the runs as JSON")
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
    if own.json:
        print_json([each.to_json() for each in listed])
        return EXIT_DONE
    _print(listed, parent=own.output_dir, num_found=len(folders))
    return EXIT_DONE


def _print(listed: Sequence[ListedRun], *, parent: Path, num_found: int) -> None:
    from crosstune.cli.output import QUIET, WARNING, print_line

    if not listed:
        print_line(f"There are no{' such' * bool(num_found)} runs in {parent}.")
        return
    lines = run_lines(listed, width=_width())
    print_line(lines[0], style=QUIET)
    for line, each in zip(lines[1:], listed, strict=True):
        print_line(line, style=_STYLES.get(each.status))
    for each in listed:
        for problem in each.problems:
            print_line(f"damaged  {each.name}: {problem}", style=WARNING)
    if len(listed) < num_found:
        print_line(f"{len(listed)} of {num_found:,} runs; --all lists every one", style=QUIET)


def _width() -> int | None:
    from crosstune.cli.columns import terminal_width

    return terminal_width()


def run_lines(listed: Sequence[ListedRun], *, width: int | None) -> list[str]:
    """Return the table of runs with its head."""
    from crosstune.cli.columns import Column, table_lines

    def column(title: str, cell: Callable[[ListedRun], str], *, rank: int = 0, right: bool = True) -> Column:
        return Column(
            title=title,
            cells=[cell(each) for each in listed],
            rank=rank,
            right=right,
            cuts=title in ("run", "model"),
        )

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
        column(
            "memory", lambda each: size(each.peak_memory_bytes) if each.peak_memory_bytes else "-", rank=8
        ),
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
