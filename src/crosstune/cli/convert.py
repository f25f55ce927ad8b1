"""`crosstune convert`: change how the weights of a model folder are quantized."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crosstune.cli.arguments import Parser, at_least, print_json
from crosstune.cli.merge import numbers, print_report, print_warnings
from crosstune.core.errors import EXIT_DONE
from crosstune.core.quantizers import quantizer_names, read_quantizers

EXAMPLES = """examples:
  crosstune convert models/llama-bnb-4bit --from bnb --to hqq --n_bits 4 --group_size 128
  crosstune convert models/llama-bnb-4bit --from bnb --to quanto --original models/llama
  crosstune convert smollm2-135m --to bnb
  crosstune convert models/llama-hqq-4bit --to none
  crosstune convert smollm2-135m --to mlx --n_bits 4 --group_size 64
  crosstune convert models/llama-mlx-4bit --to hf
  crosstune convert runs/demo/adapter --to mlx

A quantized folder is trained over as it is:
  crosstune train --model_name models/llama-hqq-4bit --train_type qlora --quantization_backend hqq --group_size 128"""


def run(words: Sequence[str]) -> int:
    parser = Parser(
        "convert",
        description="Rewrite a model folder with its weights quantized, quantized otherwise, or plain.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a model folder, or any model as --model_name takes it"
    )
    parser.add_argument(
        "--from",
        dest="held",
        choices=(*quantizer_names(), "none"),
        help="what the folder holds; checked",
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=(*quantizer_names(), "none", "hf", "peft"),
        help="none and hf are the same: plain weights. For an adapter folder: mlx or peft",
    )
    parser.add_argument(
        "--n_bits",
        type=at_least(1),
        help="bits of a weight (default 4); with --to mlx, 16 for dense weights",
    )
    parser.add_argument("--group_size", type=at_least(1), help="weights that share a scale (default 64)")
    parser.add_argument("--quant_type", help="nf4 or fp4 (bnb), int or float8 (quanto)")
    parser.add_argument(
        "--double_quant", choices=("true", "false"), help="bnb: quantize scales too (default true)"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "bf16", "fp16", "fp32"),
        default="auto",
        help="of weights that stay dense, and of scales (default: the model's)",
    )
    parser.add_argument(
        "--original",
        help="folder of the weights before quantization; none to do without them. Of an adapter: its base model",
    )
    parser.add_argument(
        "--out",
        type=lambda text: Path(text).expanduser().absolute(),
        help="folder for the result (default: named after the model, the form and its bits, such as NAME-mlx-4bit)",
    )
    parser.add_argument(
        "--force", action="store_true", help="take --original though it is not the recorded one"
    )
    parser.add_argument("--backend", default="auto", help="where to run (default auto)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    own = parser.parse_args(list(words))

    from crosstune.cli.screen import Screen
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
    report = convert(request, observer=Screen(live=not own.json))
    report["warnings"] = [*report.get("warnings", ()), *_without_effect(own, report)]
    if own.json:
        print_json(report)
    elif "exact" in report:
        print_warnings(report)
        print(f"checked  {report['num_matrices']} matrices, the same bits there and back")
        print(f"written  {report['path']}")
    elif "agreement" in report:
        print(f"converted {_source_words(report)}, compared with {report['reference']}")
        if "before" in report:
            print(f"  before  weights {report['before']['weights']:.4f} off")
            print(f"          {numbers(report['before']['agreement'])}")
        print_report(report)
    else:
        _print_conversion(report)
    return EXIT_DONE


def _source_words(report: Mapping[str, Any]) -> str:
    words = {
        "original": "from the original weights",
        "dequantized": "through the quantized weights made dense, without the original ones",
    }[report["started_from"]]
    return f"{report['from']} -> {report['to']}, {words}"


def _without_effect(own: argparse.Namespace, report: Mapping[str, Any]) -> list[str]:
    quantizers = read_quantizers()
    heeded = {
        "n_bits": list(quantizers),
        "group_size": list(quantizers),
        "quant_type": [name for name, quantizer in quantizers.items() if quantizer.takes_kind],
        "double_quant": [name for name, quantizer in quantizers.items() if quantizer.bits_with_double_quant],
    }
    is_adapter = "exact" in report
    return [
        f"--{option} has no effect {'on an adapter' if is_adapter else f'with --to {own.to}'}"
        for option, forms in heeded.items()
        if getattr(own, option) is not None and (is_adapter or own.to not in forms)
    ]


def _print_conversion(report: Mapping[str, Any]) -> None:
    print_warnings(report)
    print(f"converted  {_source_words(report)}")
    print(f"measured against {report['reference']}:")
    for name in ("before", "after"):
        if name in report["weights"]:
            weights = report["weights"][name]
            print(
                f"  {name:<7} weights {weights['relative']:.4f} off (worst {weights['worst']:.4f}, {weights['worst_layer']})"
            )
            print(f"  {'':<7} {numbers(report['logits'][name])}")
    print(f"written    {report['path']}")
