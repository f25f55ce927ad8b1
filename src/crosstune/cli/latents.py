"""`crosstune latents`: build (text, vector) pairs, decode vectors, encode texts, evaluate a trained model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from crosstune.cli.arguments import Parser, at_least, print_json, read_path, read_path_or_name
from crosstune.cli.output import Output, print_line
from crosstune.config.load import cache_override
from crosstune.core.errors import EXIT_DONE, UserError

if TYPE_CHECKING:
    from crosstune.recipes.latent_diffusion.trained import Trained

EXAMPLES = """examples:
  crosstune latents build grammar --out pairs/grammar              generated sentences, nothing to download
  crosstune latents build texts.txt --out pairs/mine               one text on each line, embedded with MiniLM
  crosstune latents build wordnet --out pairs/wordnet --too_long drop
  crosstune latents build original/ --out pairs/original           tokens/*.npz + latents/*.npy, or train_data.jsonl
  crosstune latents export pairs/mine --out original --layout shards
  crosstune train --recipe latent_diffusion --dataset pairs/mine --max_steps 2000
  crosstune latents decode runs/NAME --text "the tiny cat sees a red ball" --live
  crosstune latents decode runs/NAME --vectors vectors.npy --correct 8
  crosstune latents encode runs/NAME --text "the tiny cat sees a red ball" --out vectors.npy
  crosstune latents eval runs/NAME --data pairs/mine --correct 8 --json"""

_HELP = {
    "build": "make a folder of (text, vector) pairs from texts, a corpus or an original layout",
    "export": "write a folder of pairs in one of the original layouts",
    "decode": "turn vectors into texts; with --text, embed a text and decode its vector",
    "encode": "turn texts into vectors with the model itself, by DDIM",
    "eval": "score a model on held-out pairs, with controls",
}


def make_parser() -> Parser:
    summary = "\n".join(f"  {name:<8} {text}" for name, text in _HELP.items())
    parser = Parser(
        "latents", description=f"Latents and the texts they stand for:\n\n{summary}", epilog=EXAMPLES
    )
    parser.add_argument("action", choices=tuple(_HELP))
    parser.add_argument("target", type=read_path_or_name, metavar="TEXTS|PAIRS|RUN")
    parser.add_argument("--out", type=read_path, help="folder or .npy file for the result")
    parser.add_argument("--overwrite", action="store_true", help="for build: replace the pairs in --out")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--encoder", type=read_path_or_name, help="sentence-transformers folder (default minilm-l6-v2)"
    )
    parser.add_argument("--device", help="torch device (default: the GPU if there is one)")
    _add_build_arguments(parser)
    _add_sampling_arguments(parser)
    return parser


def _add_build_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--max_tokens", type=at_least(1), default=24, help="for build: longest text (default 24)"
    )
    parser.add_argument(
        "--too_long", choices=("error", "drop"), default="error", help="for build: longer texts"
    )
    parser.add_argument("--max_texts", type=at_least(1), default=-1, help="for build: read at most this many")
    parser.add_argument(
        "--crops", type=at_least(0), default=0, help="for build: add spans of each training text"
    )
    parser.add_argument(
        "--min_count", type=at_least(1), default=1, help="for build: drop rarer tokens (default 1)"
    )
    parser.add_argument(
        "--validation_share", type=at_least(0.0), default=0.05, help="for build: held out (default 0.05)"
    )
    parser.add_argument(
        "--max_validation", type=at_least(0), default=1000, help="for build: at most this many (default 1000)"
    )
    parser.add_argument(
        "--vectors_dtype", choices=("fp32", "fp16"), default="fp32", help="for build (default fp32)"
    )
    parser.add_argument(
        "--file", type=read_path, help="for build: a copy of the corpus, instead of downloading it"
    )
    parser.add_argument(
        "--layout", choices=("files", "shards"), default="shards", help="for export (default shards)"
    )


def _add_sampling_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--vectors", type=read_path, metavar="NPY", help="for decode, and for build instead of embedding"
    )
    parser.add_argument("--text", action="append", help="for decode and encode; may be repeated")
    parser.add_argument("--data", type=read_path, metavar="PAIRS", help="for eval: a folder of pairs")
    parser.add_argument(
        "--samples", type=at_least(1), default=1000, help="for eval: held-out pairs (default 1000)"
    )
    parser.add_argument("--steps", type=at_least(1), help="denoising steps (default 8, for encode 10)")
    parser.add_argument("--temperature", type=at_least(0.0), default=0.0, help="for decode (default 0)")
    parser.add_argument(
        "--guidance", type=at_least(0.0), default=1.0, help="classifier-free guidance (default 1)"
    )
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument(
        "--correct",
        type=at_least(0),
        default=0,
        metavar="ROUNDS",
        help="embed, mask and fill again (default 0)",
    )
    parser.add_argument(
        "--num_lengths", type=at_least(1), default=1, help="for decode and eval: lengths tried (default 1)"
    )
    parser.add_argument("--live", action="store_true", help="for decode: show every denoising step")


def run(words: Sequence[str]) -> int:
    parser = make_parser()
    own = parser.parse_args(list(words))
    needed = {"build": ("out",), "export": ("out",), "eval": ("data",)}.get(own.action, ())
    for name in needed:
        if getattr(own, name) is None:
            parser.error(f"{own.action} needs --{name}")
    if own.action == "decode" and (own.vectors is None) == (not own.text):
        parser.error("decode needs either --vectors or --text")
    if own.action == "encode" and not own.text:
        parser.error("encode needs --text")
    actions = {"build": _build, "export": _export, "decode": _decode, "encode": _encode, "eval": _evaluate}
    return actions[own.action](own)


def _build(own: argparse.Namespace) -> int:
    from crosstune.cli.count_line import CountLine
    from crosstune.recipes.latent_diffusion.build import BuildRequest, build
    from crosstune.recipes.latent_diffusion.encoders import MINILM
    from crosstune.recipes.latent_diffusion.pair_folder import is_pair_folder
    from crosstune.recipes.latent_diffusion.write_pairs import WriteOptions

    if own.validation_share >= 1:
        raise UserError("--validation_share is 1 or more.", why="nothing would be left to train on.")
    if is_pair_folder(own.out) and not own.overwrite:
        raise UserError(
            f"{own.out} holds pairs already.",
            do="give another --out FOLDER, or replace them with --overwrite",
        )
    with CountLine() as line:
        written = build(
            BuildRequest(
                source=own.target,
                out=own.out,
                encoder=own.encoder or MINILM,
                vectors=own.vectors,
                file=own.file,
                most_texts=own.max_texts,
                crops=own.crops,
                validation_share=own.validation_share,
                most_validation=own.max_validation,
                options=WriteOptions(
                    max_tokens=own.max_tokens,
                    too_long=own.too_long,
                    min_count=own.min_count,
                    dtype=own.vectors_dtype,
                ),
                cache=cache_override(),
                device=own.device,
                progress=lambda stage, done, total: line.show(
                    f"{stage} encoder or corpus", done, total, unit="bytes"
                ),
                on_text=lambda done, total: line.show("embedding", done, total, unit="texts"),
            )
        )
    facts = {name: value for name, value in written.manifest.items() if name != "files"}
    if own.json:
        print_json({"folder": str(written.folder), **facts})
        return EXIT_DONE
    for line_text in _built_lines(facts):
        print_line(line_text)
    print_line(f"pairs    {written.folder}")
    return EXIT_DONE


def _built_lines(facts: dict[str, Any]) -> list[str]:
    splits = ", ".join(f"{count:,} {split}" for split, count in sorted(facts["splits"].items()))
    left = ", ".join(f"{count:,} {why}" for why, count in facts["left_out"].items() if count)
    lines = [
        f"texts    {splits}; at most {facts['max_tokens']} tokens, vocabulary {facts['vocabulary']:,}",
        f"vectors  {facts['dim']} dimensions, from {facts['encoder'].get('name')}",
    ]
    if left:
        lines.append(f"left out {left}")
    if count := facts["vectors_normalised_here"]:
        lines.append(f"note     {count:,} vectors did not have norm 1 and were normalised")
    return lines


def _export(own: argparse.Namespace) -> int:
    from crosstune.recipes.latent_diffusion.layouts import write_layout
    from crosstune.recipes.latent_diffusion.pair_folder import open_pairs

    count = write_layout(open_pairs(read_path(own.target)), own.out, layout=own.layout)
    if own.json:
        print_json({"folder": str(own.out), "pairs": count, "layout": own.layout})
    else:
        print_line(f"wrote    {count:,} pairs as {own.layout} to {own.out}")
    return EXIT_DONE


def _open(own: argparse.Namespace) -> Trained:
    from crosstune.recipes.latent_diffusion.trained import open_trained

    return open_trained(read_path(own.target), device=own.device)


def _decode(own: argparse.Namespace) -> int:
    from crosstune.recipes.latent_diffusion.commands import DecodeRequest, decode

    trained, output = _open(own), Output()
    shown = _live(trained, output) if own.live and not own.json else None
    found = decode(
        trained,
        DecodeRequest(
            vectors=own.vectors,
            texts=own.text or [],
            encoder=own.encoder,
            steps=own.steps or 8,
            temperature=own.temperature,
            guidance=own.guidance,
            seed=own.seed,
            num_lengths=own.num_lengths,
            rounds=own.correct,
            device=own.device,
            on_step=shown,
        ),
    )
    if own.json:
        print_json(found)
        return EXIT_DONE
    for note in found["notes"]:
        output.line(f"note     {note}")
    for row in found["texts"]:
        print_line(row["text"])
    return EXIT_DONE


def _live(trained: Trained, output: Output) -> Any:
    """Return what prints the first text after each denoising step, in place on a terminal."""

    def show(step: int, steps: int, tokens: Any) -> None:
        output.line(f"step {step:>3}/{steps}  {trained.vocabulary.show(tokens[0].tolist())}")

    return show


def _encode(own: argparse.Namespace) -> int:
    from crosstune.recipes.latent_diffusion.commands import encode

    found = encode(
        _open(own), own.text, steps=own.steps or 10, guidance=own.guidance, seed=own.seed, out=own.out
    )
    if own.json:
        print_json(found)
    else:
        for row in found["vectors"]:
            print_line(" ".join(f"{value:.4f}" for value in row))
        if own.out is not None:
            print_line(f"wrote    {len(found['vectors'])} vectors to {own.out}")
    return EXIT_DONE


def _evaluate(own: argparse.Namespace) -> int:
    from crosstune.recipes.latent_diffusion.commands import evaluate_folder
    from crosstune.recipes.latent_diffusion.correct import CorrectOptions
    from crosstune.recipes.latent_diffusion.evaluation import EvalRequest
    from crosstune.recipes.latent_diffusion.sampling import DecodeOptions

    output = Output()
    found = evaluate_folder(
        _open(own),
        own.data,
        encoder=own.encoder,
        device=own.device,
        request=EvalRequest(
            samples=own.samples,
            decode=DecodeOptions(
                steps=own.steps or 8,
                temperature=own.temperature,
                guidance=own.guidance,
                num_lengths=own.num_lengths,
                seed=own.seed,
            ),
            correct=CorrectOptions(rounds=own.correct) if own.correct else None,
            on_stage=lambda stage: output.line(f"{stage} ..."),
        ),
    )
    if own.json:
        print_json(found)
        return EXIT_DONE
    for name, value in found.items():
        if isinstance(value, dict):
            print_line(f"{name:<24} " + "  ".join(f"{key} {number:.4g}" for key, number in value.items()))
        elif isinstance(value, (int, float)):
            print_line(f"{name:<24} {value:.4g}")
    for row in found.get("texts", ()):
        print_line("\n".join(f"  {name:<12} {text}" for name, text in row.items()) + "\n")
    return EXIT_DONE
