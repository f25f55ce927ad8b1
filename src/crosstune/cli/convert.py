"""`crosstune convert`: change how the weights of a model folder are quantized."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from crosstune.cli.arguments import Parser, at_least, read_path_or_name
from crosstune.cli.output import print_line
from crosstune.cli.results import (
    add_output_arguments,
    format_agreement,
    print_report,
    print_warnings,
    show_result,
)
from crosstune.core.quantizers import quantizer_names, read_quantizers

EXAMPLES = """examples:
  crosstune convert models/llama-bnb-4bit --from bnb --to hqq --n_bits 4 --group_size 128
  crosstune convert models/llama-bnb-4bit --from bnb --to quanto --original models/llama
  crosstune convert smollm2-135m --to bnb
  crosstune convert models/llama-hqq-4bit --to none
  crosstune convert smollm2-135m --to mlx --n_bits 4 --group_size 64
  crosstune convert models/llama-mlx-4bit --to hf
  crosstune convert runs/demo/adapter --to mlx

A quantized folder can be trained over directly:
  crosstune train --model_name models/llama-hqq-4bit --train_type qlora --quantization_backend hqq --group_size 128"""


def make_parser() -> Parser:
    parser = Parser(
        "convert",
        description="Rewrite a model folder with its weights quantized, quantized differently, or dequantized.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "model",
        type=read_path_or_name,
        metavar="MODEL",
        help="a model folder, or any model as --model_name takes it",
    )
    parser.add_argument(
        "--from",
        dest="held",
        choices=(*quantizer_names(), "none"),
        help="check that the folder holds these weights (default: no check)",
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=(*quantizer_names(), "none", "hf", "peft"),
        help="the quantizer; none or hf for dense weights. For an adapter folder: mlx or peft",
    )
    parser.add_argument(
        "--n_bits",
        type=at_least(1),
        help="bits per weight (default 4); with --to mlx, 16 for dense weights",
    )
    parser.add_argument("--group_size", type=at_least(1), help="weights that share a scale (default 64)")
    parser.add_argument("--quant_type", help="nf4 or fp4 (bnb), int or float8 (quanto)")
    parser.add_argument(
        "--double_quant", choices=("true", "false"), help="bnb: quantize the scales too (default true)"
    )
    parser.add_argument(
        "--original",
        type=read_path_or_name,
        help="folder of the weights before quantization, or none to ignore them. For an adapter: its base model",
    )
    add_output_arguments(
        parser,
        out="folder for the result (default: named after the model and the format, such as NAME-mlx-4bit)",
        dtype="dtype of dense weights and of scales (default: the model's)",
        force="accept an --original that is not the recorded one",
    )
    return parser


def run(words: Sequence[str]) -> int:
    own = make_parser().parse_args(list(words))

    from crosstune.results.convert import ConvertRequest, convert

    request = ConvertRequest(
        model=own.model,
        to=own.to,
        held=own.held,
        bits=own.n_bits or 4,
        group_size=own.group_size or 64,
        kind=own.quant_type or "auto",
        double=own.double_quant != "false",
        dtype=own.dtype,
        original=own.original,
        out=own.out,
        force=own.force,
        backend=own.backend,
    )
    return show_result(
        lambda observer: convert(request, observer=observer),
        own,
        unused=lambda report: _without_effect(own, report),
        show=_print_report,
    )


def _print_report(report: Mapping[str, Any]) -> None:
    """Print the report of a converted adapter, of a conversion checked against a bound, or of one without a bound."""
    if "exact" in report:
        print_warnings(report)
        print_line(f"checked  {report['num_matrices']} matrices: converting back gives the same bits")
        print_line(f"written  {report['path']}")
    elif "agreement" in report:
        print_line(f"converted {_describe_source(report)}, compared with {report['reference']}")
        if "before" in report:
            print_line(f"  before  relative error of the weights {report['before']['weights']:.4f}")
            print_line(f"          {format_agreement(report['before']['agreement'])}")
        print_report(report)
    else:
        _print_errors(report)


def _describe_source(report: Mapping[str, Any]) -> str:
    source = {
        "original": "from the original weights",
        "dequantized": "from the dequantized weights, without the original ones",
    }[report["started_from"]]
    return f"{report['from']} -> {report['to']}, {source}"


def _without_effect(own: argparse.Namespace, report: Mapping[str, Any]) -> list[str]:
    quantizers = read_quantizers()
    used_by = {
        "n_bits": list(quantizers),
        "group_size": list(quantizers),
        "quant_type": [name for name, quantizer in quantizers.items() if quantizer.takes_kind],
        "double_quant": [name for name, quantizer in quantizers.items() if quantizer.bits_with_double_quant],
    }
    is_adapter = "exact" in report
    return [
        f"--{option} has no effect {'on an adapter' if is_adapter else f'with --to {own.to}'}"
        for option, forms in used_by.items()
        if getattr(own, option) is not None and (is_adapter or own.to not in forms)
    ]


def _print_errors(report: Mapping[str, Any]) -> None:
    print_warnings(report)
    print_line(f"converted  {_describe_source(report)}")
    print_line(f"measured against {report['reference']}:")
    for name in ("before", "after"):
        if name in report["weights"]:
            weights = report["weights"][name]
            print_line(
                f"  {name:<7} relative error of the weights {weights['relative']:.4f} "
                f"(worst {weights['worst']:.4f}, {weights['worst_layer']})"
            )
            print_line(f"  {'':<7} {format_agreement(report['logits'][name])}")
    print_line(f"written    {report['path']}")
