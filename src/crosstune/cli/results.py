"""Arguments and printed reports that merge, export and convert share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.cli.arguments import Parser, print_json, read_path, read_path_or_name
from crosstune.cli.output import GOOD, WARNING, print_line
from crosstune.core.errors import EXIT_DONE
from crosstune.core.events import Observer

if TYPE_CHECKING:
    from crosstune.results.opened import Request

Report = dict[str, Any]


def add_request_arguments(parser: Parser) -> None:
    """Add the arguments that `read_request` reads."""
    parser.add_argument(
        "--into",
        choices=("original", "dequantized"),
        help="weights to merge into: the original ones (default), or the dequantized ones",
    )
    parser.add_argument("--base", type=read_path_or_name, help="the base model, if not at its recorded name")
    add_output_arguments(
        parser,
        out="folder for the result",
        dtype="dtype of the weights (default: the base model's)",
        force="accept a base model that is not the recorded one",
    )


def add_output_arguments(parser: Parser, *, out: str, dtype: str, force: str) -> None:
    """Add the arguments that every result has, with these texts for --help."""
    parser.add_argument("--out", type=lambda text: read_path(text).absolute(), help=out)
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp16", "fp32"), default="auto", help=dtype)
    parser.add_argument("--force", action="store_true", help=force)
    parser.add_argument("--backend", default="auto", help="backend to run on (default auto)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def read_request(own: argparse.Namespace) -> Request:
    """Return the request made from the arguments of `add_request_arguments`."""
    from crosstune.results.opened import Request

    return Request(
        target=own.target,
        out=own.out,
        into=own.into,
        dtype=own.dtype,
        base=own.base,
        force=own.force,
        backend=own.backend,
    )


def show_result(
    make: Callable[[Observer], Report],
    own: argparse.Namespace,
    *,
    unused: Callable[[Report], list[str]] = lambda report: [],
    show: Callable[[Report], None] | None = None,
) -> int:
    """Make a result, show its progress and print its report. `unused` returns warnings about options without effect."""
    from crosstune.cli.screen import Screen

    with Screen(live=not own.json) as screen:
        report = make(screen)
    report["warnings"] = [*report.get("warnings", ()), *unused(report)]
    if own.json:
        print_json(report)
    else:
        (show or print_report)(report)
    return EXIT_DONE


def print_report(report: Mapping[str, Any]) -> None:
    """Print the warnings, the comparisons of logits and the path of a result."""
    print_warnings(report)
    print_line(f"checked  {format_agreement(report['agreement'])} (bound {report['bound']:g})", style=GOOD)
    for name in ("unquantized", "own_reader"):
        if name in report:
            numbers = format_agreement(report[name]["agreement"])
            print_line(f"{'  ' + name:<15} {numbers} (bound {report[name]['bound']:g})")
    for name, agreement in report.get("against_trained", {}).items():
        print_line(f"{'  ' + name:<15} against the trained model: {format_agreement(agreement)}")
    print_line(f"written  {written_path(report)}")


def written_path(report: Mapping[str, Any]) -> Path:
    """Return the folder of a result, or the one file in it."""
    path = Path(report["path"])
    return path / report["file"] if "file" in report and path.is_dir() else path


def print_warnings(report: Mapping[str, Any]) -> None:
    for sentence in report.get("warnings", ()):
        print_line(f"warning  {sentence}", style=WARNING)


def format_agreement(agreement: Mapping[str, float]) -> str:
    return (
        f"max difference {agreement['max_abs']:.2e}  mean KL {agreement['mean_kl']:.2e}  "
        f"same top token {100 * agreement['top1']:.1f} %  relative {agreement['relative']:.2e}"
    )
