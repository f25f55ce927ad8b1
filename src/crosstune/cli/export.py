"""`crosstune export`: write a trained run or a model for other tools."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from crosstune.cli.arguments import Parser, at_least, read_path_or_name
from crosstune.cli.output import print_line
from crosstune.cli.results import (
    add_request_arguments,
    print_report,
    read_request,
    show_result,
    written_path,
)

EXAMPLES = """examples:
  crosstune export runs/demo --to hf
  crosstune export runs/demo --to gguf --gguf_type q8_0    (a folder with the file and a record of its making)
  crosstune export runs/demo --to gguf --out demo.gguf     (the file alone)
  crosstune export runs/demo --to mlx --n_bits 4 --group_size 64
  crosstune export smollm2-135m --to mlx --out smollm2-mlx

Every result is loaded again and compared with the trained model: logits, chat template, bos and eos tokens."""
_COMMANDS = {
    "hf": "crosstune chat {}",
    "mlx": "mlx_lm.chat --model {}",
    "gguf": "llama-cli -m {} -cnv",
}
"""Format -> a command of the tool that reads it."""


def make_parser() -> Parser:
    parser = Parser(
        "export", description="Write a trained run, or any model, for other tools.", epilog=EXAMPLES
    )
    parser.add_argument(
        "target", type=read_path_or_name, metavar="RUN|ADAPTER|MODEL", help="a run, an adapter, or a model"
    )
    parser.add_argument("--to", required=True, choices=("hf", "mlx", "gguf"), help="the format to write")
    parser.add_argument(
        "--gguf_type",
        choices=("auto", "f32", "f16", "bf16", "q8_0"),
        help="tensor type of a GGUF file (default: that of the weights)",
    )
    parser.add_argument(
        "--n_bits", type=at_least(1), help="bits per weight for MLX (default 16: not quantized)"
    )
    parser.add_argument(
        "--group_size", type=at_least(1), help="weights that share a scale, for MLX (default 64)"
    )
    add_request_arguments(parser)
    return parser


def run(words: Sequence[str]) -> int:
    own = make_parser().parse_args(list(words))

    from crosstune.results.export import Form, export

    form = Form(
        to=own.to, bits=own.n_bits or 16, group_size=own.group_size or 64, kind=own.gguf_type or "auto"
    )
    return show_result(
        lambda observer: export(read_request(own), form, observer=observer),
        own,
        unused=lambda report: _without_effect(own),
        show=lambda report: _show(report, own.to),
    )


def _show(report: Mapping[str, Any], to: str) -> None:
    """Print the report, and the command that tries the result in the tool it is for."""
    print_report(report)
    print_line(f"try it   {_COMMANDS[to].format(shlex.quote(str(written_path(report))))}")


def _without_effect(own: argparse.Namespace) -> list[str]:
    belongs = {"n_bits": "mlx", "group_size": "mlx", "gguf_type": "gguf"}
    return [
        f"--{option} has no effect with --to {own.to}"
        for option, form in belongs.items()
        if getattr(own, option) is not None and own.to != form
    ]
