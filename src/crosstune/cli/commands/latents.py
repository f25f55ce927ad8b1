"""`crosstune latents`: build text-vector pairs; decode, encode, sample and evaluate with a trained model."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from crosstune.cli.arguments import (
    ActionParser,
    Line,
    announce_command,
    at_least,
    print_result,
    print_written,
    read_path,
    read_path_or_name,
    read_run,
)
from crosstune.cli.terminal.figures import count, size
from crosstune.cli.terminal.output import Output
from crosstune.core.errors import EXIT_DONE, UserError
from crosstune.files.paths import shown_path

if TYPE_CHECKING:
    from crosstune.recipes.latent_diffusion.settings import DecodeOptions, OnStep
    from crosstune.recipes.latent_diffusion.trained import Trained

EXAMPLES = """examples:
  crosstune latents build grammar --out pairs/grammar              generated sentences, nothing to download
  crosstune latents build texts.txt --out pairs/mine               one text per line, embedded with MiniLM
  crosstune latents build wordnet --out pairs/wordnet --too_long drop
  crosstune latents build texts.txt --out pairs/more --crops 4 --mixes 4   with more texts, made from spans
  crosstune latents build original/ --out pairs/original           tokens/*.npz + latents/*.npy, or train_data.jsonl
  crosstune latents export pairs/mine --out original --layout shards
  crosstune train --recipe latent_diffusion --dataset pairs/mine --max_steps 2000
  crosstune latents decode runs/NAME --text "the tiny cat sees a red ball" --live
  crosstune latents decode runs/NAME --vectors vectors.npy --correct 8 --out texts.jsonl
  crosstune latents encode runs/NAME --text "the tiny cat sees a red ball" --out vectors.npy
  crosstune latents sample runs/NAME --samples 5 --temperature 0.8 --out vectors.npy
  crosstune latents eval runs/NAME --data pairs/mine --correct 8 --json"""

ACTIONS = {
    "build": "make a folder of text-vector pairs from sentences, a corpus or an original layout",
    "export": "write a folder of pairs in one of the original layouts",
    "decode": "turn vectors into texts; with --text, embed a text and decode its vector",
    "encode": "turn texts into vectors with the model, by DDIM",
    "sample": "sample texts and vectors from noise, with a model trained on unconditional or random",
    "eval": "score a model on held-out pairs, with controls",
}


def make_parser() -> ActionParser:
    parser = ActionParser("latents", ACTIONS, description="Texts and their latent vectors:", epilog=EXAMPLES)
    parser.add_argument("target", type=read_path_or_name, metavar="TEXTS|PAIRS|RUN")
    add = parser.add_for
    out = "folder of pairs; .npy file of the vectors; for decode, a JSON Lines file of the texts"
    add("build export decode encode sample", "--out", type=read_path, help=out)
    encoder = "sentence-transformers folder, instead of minilm-l6-v2 or the model's own"
    add("build decode sample eval", "--encoder", type=read_path_or_name, help=encoder)
    add("build decode encode sample eval", "--device", help="torch device (default: the GPU, if any)")
    overwrite = "replace the pairs, or the existing file, in --out"
    add("build decode encode sample", "--overwrite", action="store_true", help=overwrite)
    add("build", "--max_tokens", type=at_least(1), default=24, help="maximum tokens per text")
    add("build", "--too_long", choices=("error", "drop"), default="error", help="handling of longer texts")
    add("build", "--max_texts", type=at_least(1), default=-1, help="read at most this many")
    add("build", "--crops", type=at_least(0), default=0, help="spans to add per training text")
    mixes = "texts to add per training text, each joining a span of it and a span of another"
    add("build", "--mixes", type=at_least(0), default=0, help=mixes)
    add("build", "--min_count", type=at_least(1), default=1, help="omit rarer tokens from the vocabulary")
    add("build", "--validation_share", type=at_least(0.0), default=0.05, help="fraction to hold out")
    add("build", "--max_validation", type=at_least(0), default=1000, help="hold out at most this many")
    add("build", "--vectors_dtype", choices=("fp32", "fp16"), default="fp32", help="dtype on disk")
    add("build", "--file", type=read_path, help="a local copy of the corpus, instead of a download")
    add("export", "--layout", choices=("files", "shards"), default="shards", help="original layout")
    vectors = "vectors of the texts, instead of embedding them"
    add("build decode", "--vectors", type=read_path, metavar="NPY", help=vectors)
    add("decode encode", "--text", action="append", help="a text; may be repeated")
    add("eval", "--data", type=read_path, metavar="PAIRS", help="a folder of pairs")
    samples = "number of texts (default 4) or held-out pairs (default 1000)"
    add("sample eval", "--samples", type=at_least(1, high=10**6), help=samples)
    steps = "denoising steps (default 8; encode 10, sample 24)"
    add("decode encode sample eval", "--steps", type=at_least(1, high=1000), help=steps)
    temperature = "0: greedy (default; sample: 1)"
    add("decode sample eval", "--temperature", type=at_least(0.0), help=temperature)
    add("decode encode eval", "--guidance", type=at_least(0.0), default=1.0, help="classifier-free guidance")
    add("decode encode sample eval", "--seed", type=at_least(0), default=0, help="random seed")
    rounds = "rounds of embedding the decoded text, masking part of it and decoding it again"
    add("decode eval", "--correct", type=at_least(0, high=1000), default=0, metavar="ROUNDS", help=rounds)
    add("decode eval", "--num_lengths", type=at_least(1), default=1, help="number of likely lengths to try")
    add("decode sample", "--live", action="store_true", help="show every denoising step of the first text")
    return parser


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
    parser.refuse_others(own)
    if own.out is not None and own.action in ("decode", "encode", "sample"):
        from crosstune.files.outputs import check_output

        makes_folder = own.action != "decode"
        check_output(
            own.out, option="out", inputs=[own.vectors], overwrite=own.overwrite, makes_folder=makes_folder
        )
    announce_command(f"latents {own.action}", str(own.target), "importing the engine")
    actions = {"build": _build, "export": _export, "decode": _decode, "encode": _encode}
    return (actions | {"sample": _sample, "eval": _eval})[own.action](own)


def _build(own: argparse.Namespace) -> int:
    from crosstune.cli.terminal.screen import Screen
    from crosstune.recipes.latent_diffusion.build import BuildRequest, build
    from crosstune.recipes.latent_diffusion.encoders import MINILM
    from crosstune.recipes.latent_diffusion.pair_folder import is_pair_folder
    from crosstune.recipes.latent_diffusion.texts import WriteOptions

    if own.validation_share >= 1:
        raise UserError("--validation_share must be below 1.", why="no training data would remain.")
    if is_pair_folder(own.out) and not own.overwrite:
        raise UserError(
            f"{own.out} already contains pairs.",
            do="choose a different --out FOLDER, or replace them with --overwrite",
        )
    with Screen(live=True) as screen:
        facts = build(
            BuildRequest(
                source=own.target,
                out=own.out,
                encoder=own.encoder or MINILM,
                vectors=own.vectors,
                file=own.file,
                max_texts=own.max_texts,
                crops=own.crops,
                mixes=own.mixes,
                validation_share=own.validation_share,
                max_validation=own.max_validation,
                options=WriteOptions(
                    max_tokens=own.max_tokens,
                    too_long=own.too_long,
                    min_count=own.min_count,
                    dtype=own.vectors_dtype,
                ),
                device=own.device,
                progress=lambda stage, done, total: screen.show_stage(
                    f"{stage} encoder or corpus", done, total, [size(done)]
                ),
                on_text=lambda stage, done, total: screen.show_stage(
                    stage, done, total, [f"{done:,} texts"], unit=count
                ),
            )
        )
    del facts["files"]
    lines = _built_lines(facts, shown_path(own.out))
    return print_result({"folder": str(own.out), **facts}, lines, as_json=own.json)


def _built_lines(facts: Mapping[str, Any], folder: str) -> Iterator[Line]:
    splits = ", ".join(f"{count:,} {split}" for split, count in sorted(facts["splits"].items()))
    left = [f"{number:,} {why.replace('_', ' ')}" for why, number in facts["left_out"].items() if number]
    yield f"texts    {splits}; at most {facts['max_tokens']} tokens, vocabulary {facts['vocabulary']:,}"
    yield f"vectors  {facts['dim']} dimensions, from {facts['encoder'].get('name')}"
    if left:
        yield f"left out {', '.join(left)}"
    if number := facts["vectors_normalised_here"]:
        yield f"note     {number:,} vectors were normalized to norm 1"
    yield f"pairs    {folder}"
    yield f"train    crosstune train --recipe latent_diffusion --dataset {shlex.quote(folder)}"


def _export(own: argparse.Namespace) -> int:
    from crosstune.recipes.latent_diffusion.layouts import write_layout
    from crosstune.recipes.latent_diffusion.pair_folder import open_pairs

    number = write_layout(open_pairs(read_path(own.target)), own.out, layout=own.layout)
    found = {"folder": str(own.out), "pairs": number, "layout": own.layout}
    return print_result(found, [f"written  {own.out} ({number:,} pairs as {own.layout})"], as_json=own.json)


def _decode(own: argparse.Namespace) -> int:
    from crosstune.recipes.latent_diffusion.trained import decode

    trained, output = _open(own), Output()
    live = own.live and not own.json

    def show_round(done: int, cosine: float) -> None:
        output.line(f"round {done:>2}/{own.correct}  mean cosine {cosine:.4f}")

    found = decode(
        trained,
        vectors=own.vectors,
        texts=own.text or [],
        options=_options(own, steps=8),
        rounds=own.correct,
        out=own.out,
        on_step=_live(trained, output) if live else None,
        on_round=show_round if live else None,
        on_done=lambda done, total: output.line(f"decoded  {done:,} of {total:,} vectors"),
        say=output.line,
    )
    for note in () if own.json else found["notes"]:
        output.line(f"note     {note}")
    if own.out is not None and not own.json:
        print_written(own.out, f"{len(found['texts'])} texts")
        return EXIT_DONE
    return print_result(found, [row["text"] for row in found["texts"]], as_json=own.json)


def _encode(own: argparse.Namespace) -> int:
    from crosstune.recipes.latent_diffusion.trained import encode

    steps = own.steps or 10
    found = encode(_open(own), own.text, steps=steps, guidance=own.guidance, seed=own.seed, out=own.out)
    lines = [" ".join(f"{value:.4f}" for value in row) for row in found["vectors"]]
    written = [f"written  {own.out} ({len(lines)} vectors)"] if own.out is not None else []
    return print_result(found, lines + written, as_json=own.json)


def _sample(own: argparse.Namespace) -> int:
    from crosstune.recipes.latent_diffusion.trained import sample

    trained, output = _open(own), Output()
    found = sample(
        trained,
        own.samples or 4,
        options=_options(own, steps=24, temperature=1.0),
        out=own.out,
        on_step=_live(trained, output) if own.live and not own.json else None,
    )
    print_result(found, [row["text"] for row in found["texts"]], as_json=own.json)
    if own.out is not None and not own.json:
        print_written(own.out, f"{len(found['texts'])} vectors")
    return EXIT_DONE


def _eval(own: argparse.Namespace) -> int:
    from crosstune.recipes.latent_diffusion.evaluation import evaluate

    output = Output()
    found = evaluate(
        _open(own),
        own.data,
        options=_options(own, steps=8),
        rounds=own.correct,
        samples=own.samples or 1000,
        on_stage=lambda stage: output.line(f"{stage} ..."),
    )
    return print_result(found, _eval_lines(found), as_json=own.json)


def _eval_lines(found: Mapping[str, Any]) -> Iterator[Line]:
    for name, value in found.items():
        if isinstance(value, dict):
            yield f"{name:<24} " + "  ".join(f"{key} {number:.4g}" for key, number in value.items())
        elif isinstance(value, (int, float)):
            yield f"{name:<24} {value:.4g}"
    for row in found.get("texts", ()):
        yield "\n".join(f"  {name:<12} {text}" for name, text in row.items()) + "\n"


def _open(own: argparse.Namespace) -> Trained:
    from crosstune.recipes.latent_diffusion.trained import open_trained

    return open_trained(read_path(read_run(own.target)), device=own.device, encoder=own.encoder)


def _options(own: argparse.Namespace, *, steps: int, temperature: float = 0.0) -> DecodeOptions:
    from crosstune.recipes.latent_diffusion.settings import DecodeOptions

    return DecodeOptions(
        steps=own.steps or steps,
        temperature=own.temperature if own.temperature is not None else temperature,
        guidance=own.guidance,
        num_lengths=own.num_lengths,
        seed=own.seed,
    )


def _live(trained: Trained, output: Output) -> OnStep:
    """Return a function that prints the first text after each denoising step."""

    def show(step: int, steps: int, tokens: Any) -> None:
        output.line(f"step {step:>3}/{steps}  {trained.vocabulary.show(tokens[0].tolist())}")

    return show
