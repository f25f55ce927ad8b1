"""`crosstune report`: write the HTML report of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from crosstune.cli.arguments import Parser, print_json


def run(words: Sequence[str]) -> int:
    parser = Parser(
        "report",
        description="Write report.html from the files of a run, finished or not.",
        epilog="examples:\n  crosstune report runs/demo\n  crosstune report runs/demo --json",
    )
    parser.add_argument("run", type=Path, help="the run folder, such as runs/demo")
    parser.add_argument("--json", action="store_true", help="print the path as JSON")
    own = parser.parse_args(list(words))

    from crosstune.report import write_report

    path = write_report(own.run)
    if own.json:
        print_json({"report": str(path)})
    else:
        print(path)
    return 0
