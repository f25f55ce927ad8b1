"""`crosstune merge`: fold a trained adapter into the weights of its base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.cli.arguments import Parser, print_json
from crosstune.core.errors import EXIT_DONE

if TYPE_CHECKING:
    from crosstune.results.merge import Request

EXAMPLES = """examples:
  crosstune merge runs/demo
  crosstune merge runs/demo/adapter --out merged --dtype fp32
  crosstune merge runs/qlora --into dequantized

An adapter that was trained over a quantized base has learned to mend that base's errors. `--into original` folds it
into the weights before quantization; `--into dequantized` into exactly what training saw. Both are measured."""


def run(words: Sequence[str]) -> int:
    parser = Parser(
        "merge", description="Fold a LoRA or DoRA adapter into the weights of its base.", epilog=EXAMPLES
    )
    parser.add_argument("target", metavar="RUN|ADAPTER", help="a run folder or an adapter folder")
    add_result_words(parser)
    own = parser.parse_args(list(words))

    from crosstune.cli.screen import Screen
    from crosstune.results.export import merge

    report = merge(read_request(own), observer=Screen(live=not own.json))
    if own.json:
        print_json(report)
    else:
        print_report(report)
    return EXIT_DONE


def add_result_words(parser: Parser) -> None:
    parser.add_argument(
        "--into",
        choices=("original", "dequantized"),
        help="weights to fold into: the original ones (default), or the quantized ones made dense again",
    )
    parser.add_argument(
        "--out", type=lambda text: Path(text).expanduser().absolute(), help="folder for the result"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "bf16", "fp16", "fp32"),
        default="auto",
        help="number format (default: the base's)",
    )
    parser.add_argument("--base", help="the base model, where it is not found under its recorded name")
    parser.add_argument("--force", action="store_true", help="go on with a base that is not the recorded one")
    parser.add_argument("--backend", default="auto", help="where to run (default auto)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def read_request(own: Any) -> Request:
    """What `add_result_words` asked for."""
    from crosstune.results.merge import Request

    return Request(
        target=own.target,
        out=own.out,
        into=own.into,
        dtype=own.dtype,
        base=own.base,
        force=own.force,
        backend=own.backend,
    )


def print_warnings(report: Mapping[str, Any]) -> None:
    for sentence in report.get("warnings", ()):
        print(f"warning  {sentence}")


def print_report(report: Mapping[str, Any]) -> None:
    print_warnings(report)
    print(f"checked  {numbers(report['agreement'])} (bound {report['bound']:g})")
    for name in ("unquantized", "own_reader"):
        if name in report:
            print(f"{'  ' + name:<15} {numbers(report[name]['agreement'])} (bound {report[name]['bound']:g})")
    for name, agreement in report.get("against_trained", {}).items():
        print(f"{'  ' + name:<15} against the trained model: {numbers(agreement)}")
    print(f"written  {report['path']}")


def numbers(agreement: Mapping[str, float]) -> str:
    return (
        f"max difference {agreement['max_abs']:.2e}  mean KL {agreement['mean_kl']:.2e}  "
        f"same first choice {100 * agreement['top1']:.1f} %  relative {agreement['relative']:.2e}"
    )
