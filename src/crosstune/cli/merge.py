"""`crosstune merge`: merge a trained adapter into the weights of its base model."""

from __future__ import annotations

from collections.abc import Sequence

from crosstune.cli.arguments import Parser, read_path_or_name
from crosstune.cli.results import add_request_arguments, read_request, show_result

EXAMPLES = """examples:
  crosstune merge runs/demo
  crosstune merge runs/demo/adapter --out merged --dtype fp32
  crosstune merge runs/qlora --into dequantized

An adapter trained over a quantized base has learned to correct its quantization errors. `--into original` merges it into
the weights before quantization, `--into dequantized` into exactly the weights used in training. Both are measured."""


def make_parser() -> Parser:
    parser = Parser(
        "merge",
        description="Merge a LoRA or DoRA adapter into the weights of its base model.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "target", type=read_path_or_name, metavar="RUN|ADAPTER", help="a run folder or an adapter folder"
    )
    add_request_arguments(parser)
    return parser


def run(words: Sequence[str]) -> int:
    own = make_parser().parse_args(list(words))

    from crosstune.results.merge import merge

    return show_result(lambda observer: merge(read_request(own), observer=observer), own)
