"""`crosstune merge`, `export` and `convert`: write a trained run or a model in a different form."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.cli.arguments import (
    Line,
    Parser,
    announce_command,
    at_least,
    print_result,
    read_path,
    read_path_or_name,
    read_run,
)
from crosstune.cli.terminal.output import GOOD, WARNING
from crosstune.core.quantization import GGUF_TYPES, quantizer_names, read_quantizers

if TYPE_CHECKING:
    from crosstune.results.opened import Request

Report = dict[str, Any]

MERGE_EXAMPLES = """examples:
  crosstune merge runs/demo
  crosstune merge runs/demo/adapter --out merged --dtype fp32
  crosstune merge runs/qlora --into dequantized

An adapter trained on a quantized base has learned to correct its quantization errors. `--into original` merges it into
the weights before quantization, `--into dequantized` into exactly the weights used in training. Both are measured."""
EXPORT_EXAMPLES = """examples:
  crosstune export runs/demo --to hf
  crosstune export runs/demo --to gguf --gguf_type q8_0    (a folder with the file and its record)
  crosstune export runs/demo --to gguf --out demo.gguf     (only the file)
  crosstune export runs/demo --to gguf --gguf_type q4_k_m
  crosstune export runs/demo --to gguf --max_kl 0.02       (the smallest file this close to the model)
  crosstune export runs/demo --to gguf --adapter_only      (the adapter without its base)
  crosstune export runs/demo --to ollama --gguf_type q8_0  (with a Modelfile)
  crosstune export runs/demo --to vllm                     (print the command that serves it)
  crosstune export runs/demo --to mlx --n_bits 4 --group_size 64
  crosstune export smollm2-135m --to mlx --out smollm2-mlx

Every result is loaded again and compared with the trained model: logits, chat template, bos and eos tokens."""
CONVERT_EXAMPLES = """examples:
  crosstune convert models/llama-bnb-4bit --from bnb --to hqq --n_bits 4 --group_size 128
  crosstune convert models/llama-bnb-4bit --from bnb --to quanto --original models/llama
  crosstune convert smollm2-135m --to bnb
  crosstune convert models/llama-hqq-4bit --to none
  crosstune convert smollm2-135m --to mlx --n_bits 4 --group_size 64
  crosstune convert models/llama-mlx-4bit --to hf
  crosstune convert runs/demo/adapter --to mlx

A quantized folder can be used for training directly:
  crosstune train --model_name models/llama-hqq-4bit --train_type qlora --quantization_backend hqq --group_size 128"""
_TRY = {
    "hf": "crosstune chat {0}",
    "mlx": "mlx_lm.chat --model {0}",
    "gguf": "crosstune serve {0}, or llama-cli -m {0} -cnv",
    "ollama": "ollama create {0}",
}
"""Format -> a command that uses it."""


def make_parser_merge() -> Parser:
    about = "Merge a LoRA or DoRA adapter into the weights of its base model."
    parser = Parser("merge", description=about, epilog=MERGE_EXAMPLES)
    parser.add_argument("target", type=read_run, metavar="RUN|ADAPTER", help="a run or an adapter")
    _add_request_arguments(parser)
    return parser


def run_merge(words: Sequence[str]) -> int:
    own = make_parser_merge().parse_args(list(words))

    from crosstune.results.merge import merge

    return _make("merge", partial(merge, _read_request(own)), own)


def make_parser_export() -> Parser:
    parser = Parser(
        "export", description="Write a trained run, or any model, for other tools.", epilog=EXPORT_EXAMPLES
    )
    add = parser.add_argument
    add("target", type=read_run, metavar="RUN|ADAPTER|MODEL", help="a run, an adapter or a model")
    add("--to", required=True, choices=("hf", "mlx", "gguf", "ollama", "vllm"), help="the tool to write for")
    kinds = "type of a GGUF file's weights (default: the model's); q6_k to q3_k_m need crosstune[llamacpp]"
    add("--gguf_type", choices=("auto", *GGUF_TYPES), help=kinds)
    rows = "GGUF: quantize with less error where the run's training rows have large activations"
    add("--imatrix", action="store_true", default=None, help=rows)
    kl = (
        "GGUF: with --gguf_type auto, the smallest file with at most this mean KL divergence on held-out rows"
    )
    add("--max_kl", type=at_least(0.0), metavar="NUMBER", help=kl)
    add("--adapter_only", action="store_true", default=None, help="GGUF: write the adapter without its base")
    add("--n_bits", type=at_least(1), help="bits per weight for MLX (default 16: not quantized)")
    add("--group_size", type=at_least(1), help="weights per quantization scale, for MLX (default 64)")
    _add_request_arguments(parser)
    return parser


def run_export(words: Sequence[str]) -> int:
    own = make_parser_export().parse_args(list(words))

    from crosstune.results.export import export
    from crosstune.results.opened import Form

    by_type = own.to == "ollama" or (own.to == "gguf" and not own.adapter_only)
    form = Form(
        to=own.to,
        bits=own.n_bits or 16,
        group_size=own.group_size or (32 if own.to == "mxfp4" else 64),
        kind=own.gguf_type if own.gguf_type and by_type else "auto",
        adapter_only=bool(own.adapter_only) and own.to == "gguf",
        imatrix=bool(own.imatrix) and by_type,
        max_kl=own.max_kl if by_type else None,
    )
    used_by = {
        "n_bits": ["mlx"],
        "group_size": ["mlx"],
        **dict.fromkeys(("gguf_type", "imatrix", "max_kl"), ["gguf", "ollama"] if by_type else ()),
        "adapter_only": ["gguf"],
    } | {key: ["hf", "mlx", "gguf", "ollama"] for key in ("out", "into", "dtype")}
    return _make(
        "export",
        partial(export, _read_request(own), form),
        own,
        used_by=used_by,
        lines=lambda report: _export_lines(report, own),
    )


def _export_lines(report: Report, own: argparse.Namespace) -> Iterable[Line]:
    """Yield the lines of an export, and a command that uses the result."""
    if own.to == "vllm":
        yield from _warnings(report)
        yield f"try it   {shlex.join(report['command'])}"
        return
    yield from _report_lines(report)
    path = shlex.quote(str(_written_path(report)))
    if own.to == "ollama":
        name = (own.out or Path(own.target)).name
        path = f"{shlex.quote(name)} -f {shlex.quote(str(Path(report['path']) / 'Modelfile'))}"
    if own.adapter_only and own.to == "gguf":
        yield f"its base crosstune export {shlex.quote(str(report['base']))} --to gguf --out base.gguf"
        yield f"try it   llama-cli -m base.gguf --lora {path} -cnv"
        return
    yield f"try it   {_TRY[own.to].format(path)}"


def make_parser_convert() -> Parser:
    about = "Rewrite a model folder with its weights quantized, quantized differently, or dequantized."
    parser = Parser("convert", description=about, epilog=CONVERT_EXAMPLES)
    add, names = parser.add_argument, quantizer_names()
    model = "a folder, or any other model (see --model_name of train)"
    add("model", type=read_path_or_name, metavar="MODEL", help=model)
    held = "check that the folder contains these weights (default: no check)"
    add("--from", dest="held", choices=(*names, "none"), help=held)
    to = "the quantizer; none or hf for dense weights. For an adapter folder: mlx or peft"
    add("--to", required=True, choices=(*names, "none", "hf", "peft"), help=to)
    bits = "bits per weight (default 4); with --to mlx, 16 for dense weights"
    add("--n_bits", type=at_least(1), help=bits)
    add("--group_size", type=at_least(1), help="weights per quantization scale (default 64; mxfp4: 32)")
    add("--quant_type", help="nf4 or fp4 (bnb), int or float8 (quanto)")
    add("--double_quant", choices=("true", "false"), help="bnb: quantize the scales as well (default true)")
    original = (
        "folder of the weights before quantization, or none to ignore them. For an adapter: its base model"
    )
    add("--original", type=read_path_or_name, help=original)
    _add_output_arguments(
        parser,
        out="folder for the result (default: named after the model and the format, such as NAME-mlx-4bit)",
        dtype="dtype of dense weights and of scales (default: the model's)",
        force="accept an --original that differs from the recorded one",
    )
    return parser


def run_convert(words: Sequence[str]) -> int:
    own = make_parser_convert().parse_args(list(words))

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
    quantizers = read_quantizers()
    used_by = {
        "n_bits": list(quantizers),
        "group_size": list(quantizers),
        "quant_type": [name for name, each in quantizers.items() if each.takes_kind],
        "double_quant": [name for name, each in quantizers.items() if each.bits_with_double_quant],
    }
    return _make("convert", partial(convert, request), own, used_by=used_by, lines=_convert_lines)


def _convert_lines(report: Report) -> Iterable[Line]:
    """Yield the lines of a converted adapter, or of a conversion with or without a bound."""
    if "exact" in report:
        yield from _warnings(report)
        yield f"checked  {report['num_matrices']} matrices: converting back gives the same bits"
        yield f"written  {report['path']}"
        return
    original = "original weights" if report["started_from"] == "original" else "dequantized weights"
    yield f"converted {report['from']} -> {report['to']}, from the {original}, compared with {report['reference']}"
    if "agreement" in report:
        yield from _report_lines(report)
        return
    yield from _warnings(report)
    weights = report["weights"]
    worst = f"worst {weights['worst']:.4f}, {weights['worst_layer']}"
    yield f"measured relative error of the weights {weights['relative']:.4f} ({worst})"
    yield f"         {_agreement(report['logits'])}"
    yield f"written  {report['path']}"


def _add_request_arguments(parser: Parser) -> None:
    """Add the arguments that `_read_request` reads."""
    add, into = parser.add_argument, "weights to merge into: original (default) or dequantized"
    add("--into", choices=("original", "dequantized"), help=into)
    add("--base", type=read_path_or_name, help="the base model, if not under its recorded name")
    _add_output_arguments(
        parser,
        out="folder for the result",
        dtype="dtype of the weights (default: the base model's)",
        force="accept a base model that differs from the recorded one",
    )


def _add_output_arguments(parser: Parser, *, out: str, dtype: str, force: str) -> None:
    """Add the output arguments shared by merge, export and convert."""
    parser.add_argument("--out", type=lambda text: read_path(text).absolute(), help=out)
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp16", "fp32"), default="auto", help=dtype)
    parser.add_argument("--force", action="store_true", help=force)
    parser.add_argument("--backend", default="auto", help="backend to run on (default auto)")


def _read_request(own: argparse.Namespace) -> Request:
    from crosstune.results.opened import Request

    names = ("target", "out", "into", "dtype", "base", "force", "backend")
    return Request(**{name: getattr(own, name) for name in names})


def _make(
    command: str,
    make: Callable[..., Report],
    own: argparse.Namespace,
    *,
    used_by: Mapping[str, Sequence[str]] | None = None,
    lines: Callable[[Report], Iterable[Line]] | None = None,
) -> int:
    """Make a result with a progress display and print its report; warn about options without effect."""
    from crosstune.cli.terminal.screen import Screen

    target = own.model if command == "convert" else own.target
    announce_command(command, target, "importing the engine")
    with Screen(live=not own.json) as screen:
        report = make(observer=screen)
    is_adapter = "exact" in report
    form = f"--to {getattr(own, 'to', None)}"
    if form == "--to gguf" and own.adapter_only:
        form = "--adapter_only"
    unused = [
        f"--{option} has no effect {'on an adapter' if is_adapter else f'with {form}'}"
        for option, forms in (used_by or {}).items()
        if getattr(own, option) not in (None, "auto") and (is_adapter or own.to not in forms)
    ]
    report["warnings"] = [*report.get("warnings", ()), *unused]
    return print_result(report, (lines or _report_lines)(report), as_json=own.json)


_COMPARISONS = {
    "llama_cpp": "",
    "unquantized": "the same before quantization",
    "own_reader": "the file reopened by crosstune, with f32 weights kept and all others in bf16",
}
"""Key of a report -> description of the comparison; empty for the one above it."""


def _report_lines(report: Report) -> Iterable[Line]:
    """Yield the warnings, the logit comparisons and the path of a result."""
    yield from _warnings(report)
    if "trials" in report:
        yield f"measured KL divergence on {report['num_tokens']} held-out tokens in llama.cpp (bound {report['max_kl']:g})"
        for trial in report["trials"]:
            mark = "  chosen" if trial == report["chosen"] else ""
            yield f"  {trial['bytes'] / 1e6:10.3f} MB  {trial['kl']:.2e}  {trial['name']}{mark}"
    in_llama_cpp = "in llama.cpp: " if "llama_cpp" in report else ""
    yield f"checked  {in_llama_cpp}{_agreement(report['agreement'])} (bound {report['bound']:g})", GOOD
    if difference := report["agreement"].get("difference"):
        yield f"         {difference}"
    for name, meaning in _COMPARISONS.items():
        if name in report and meaning:
            yield f"  {meaning}:"
            yield f"         {_agreement(report[name]['agreement'])} (bound {report[name]['bound']:g})"
        if "texts" in report.get(name, ()):
            texts, answers = report[name]["texts"], report[name]["answers"]
            yield (
                f"         same token ids for {texts['same']} of {texts['compared']} texts ({texts['of_run']} from the run); "
                f"{answers['same']} of {answers['compared']} greedy answers ({answers['tokens']} tokens) agree with the trained model at "
                f"every token"
            )
            if answers["difference"]:
                yield f"         {answers['difference']}"
    yield "  differences of logits from the trained model; below its bound, `relative` is explained by rounding"
    for name, agreement in report.get("against_trained", {}).items():
        yield f"{'  ' + name:<15} against the trained model: {_agreement(agreement)}"
    yield f"written  {_written_path(report)}"


def _written_path(report: Report) -> Path:
    """Return the path of a result: its folder, or its only file."""
    path = Path(report["path"])
    return path / report["file"] if "file" in report and path.is_dir() else path


def _warnings(report: Report) -> Iterable[Line]:
    return [(f"warning  {sentence}", WARNING) for sentence in report.get("warnings", ())]


def _agreement(agreement: Mapping[str, float]) -> str:
    return (
        f"max difference {agreement['max_abs']:.2e}  mean KL {agreement['mean_kl']:.2e}  "
        f"same top token {100 * agreement['top1']:.1f} %  relative {agreement['relative']:.2e}"
    )
