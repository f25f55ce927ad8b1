"""`crosstune report`: write the HTML report of a run."""

from __future__ import annotations

from collections.abc import Sequence

from crosstune.cli.arguments import Parser, print_json, read_path


def make_parser() -> Parser:
    parser = Parser(
        "report",
        description="Write report.html from the files of a run, finished or not.",
        epilog="examples:\n  crosstune report runs/demo\n  crosstune report runs/demo --json",
    )
    parser.add_argument("run", type=read_path, help="the run folder, such as runs/demo")
    parser.add_argument("--json", action="store_true", help="print the path as JSON")
    return parser


def run(words: Sequence[str]) -> int:
    own = make_parser().parse_args(list(words))

    from crosstune.report import write_report

    path = write_report(own.run)
    if own.json:
        print_json({"report": str(path)})
    else:
        print(path)
    return 0
