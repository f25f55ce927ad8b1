"""`crosstune latents`: build (text, vector) pairs; decode, encode, sample and evaluate with a trained model."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

from crosstune.cli.arguments import Parser, at_least, read_path, read_path_or_name

EXAMPLES = """examples:
  crosstune latents build grammar --out pairs/grammar              generated sentences, nothing to download
  crosstune latents build texts.txt --out pairs/mine               one text on each line, embedded with MiniLM
  crosstune latents build wordnet --out pairs/wordnet --too_long drop
  crosstune latents build texts.txt --out pairs/more --crops 4 --mixes 4   and more texts, made of spans of these
  crosstune latents build original/ --out pairs/original           tokens/*.npz + latents/*.npy, or train_data.jsonl
  crosstune latents export pairs/mine --out original --layout shards
  crosstune train --recipe latent_diffusion --dataset pairs/mine --max_steps 2000
  crosstune latents decode runs/NAME --text "the tiny cat sees a red ball" --live
  crosstune latents decode runs/NAME --vectors vectors.npy --correct 8
  crosstune latents encode runs/NAME --text "the tiny cat sees a red ball" --out vectors.npy
  crosstune latents sample runs/NAME --samples 5 --temperature 0.8 --out vectors.npy
  crosstune latents eval runs/NAME --data pairs/mine --correct 8 --json"""

ACTIONS = {
    "build": "make a folder of (text, vector) pairs from texts, a corpus or an original layout",
    "export": "write a folder of pairs in one of the original layouts",
    "decode": "turn vectors into texts; with --text, embed a text and decode its vector",
    "encode": "turn texts into vectors with the model itself, by DDIM",
    "sample": "make new texts and their vectors from noise, with a model trained on unconditional or random",
    "eval": "score a model on held-out pairs, with controls",
}
_MODULES = {"build": "latents_data", "export": "latents_data"}
"""Action -> the module with its code; latents_use for the others."""


class _LatentsParser(Parser):
    """Refuse options that an action has no use for."""

    def __init__(self) -> None:
        summary = "\n".join(f"  {name:<8} {text}" for name, text in ACTIONS.items())
        super().__init__(
            "latents", description=f"Latents and the texts they stand for:\n\n{summary}", epilog=EXAMPLES
        )
        self.actions_of: dict[str, tuple[str, ...]] = {}

    def add_for(self, actions: str, flag: str, *, help: str, **settings: Any) -> None:
        """Add an option of some actions, named in one text with spaces between."""
        names = tuple(actions.split())
        self.actions_of[flag.removeprefix("--")] = names
        default = settings.get("default")
        shown = f" (default {default})" if default not in (None, -1, False) else ""
        self.add_argument(flag, help=f"for {', '.join(names)}: {help}{shown}", **settings)

    def refuse_others(self, own: argparse.Namespace) -> None:
        """Raise for an option that was given to an action which has no use for it."""
        for name, actions in self.actions_of.items():
            if own.action not in actions and getattr(own, name) != self.get_default(name):
                self.error(f"{own.action} takes no --{name}: it is for {', '.join(actions)}")


def make_parser() -> _LatentsParser:
    parser = _LatentsParser()
    parser.add_argument("action", choices=tuple(ACTIONS))
    parser.add_argument("target", type=read_path_or_name, metavar="TEXTS|PAIRS|RUN")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_for(
        "build export encode sample", "--out", type=read_path, help="folder, or .npy file for vectors"
    )
    parser.add_for(
        "build decode sample eval",
        "--encoder",
        type=read_path_or_name,
        help="sentence-transformers folder, instead of minilm-l6-v2 or the model's own",
    )
    parser.add_for(
        "build decode encode sample eval",
        "--device",
        help="torch device; without it, the GPU if there is one",
    )
    _add_data_arguments(parser)
    _add_sampling_arguments(parser)
    return parser


def _add_data_arguments(parser: _LatentsParser) -> None:
    add = parser.add_for
    add("build", "--overwrite", action="store_true", help="replace the pairs in --out")
    add("build", "--max_tokens", type=at_least(1), default=24, help="longest text")
    add("build", "--too_long", choices=("error", "drop"), default="error", help="what to do with longer ones")
    add("build", "--max_texts", type=at_least(1), default=-1, help="read at most this many")
    add("build", "--crops", type=at_least(0), default=0, help="add so many spans of each training text")
    add(
        "build",
        "--mixes",
        type=at_least(0),
        default=0,
        help="add so many texts for each training text that join a span of it and one of another",
    )
    add("build", "--min_count", type=at_least(1), default=1, help="leave rarer tokens out of the vocabulary")
    add("build", "--validation_share", type=at_least(0.0), default=0.05, help="share held out")
    add("build", "--max_validation", type=at_least(0), default=1000, help="hold out at most this many")
    add("build", "--vectors_dtype", choices=("fp32", "fp16"), default="fp32", help="dtype on disk")
    add("build", "--file", type=read_path, help="a copy of the corpus, instead of downloading it")
    add("export", "--layout", choices=("files", "shards"), default="shards", help="original layout")


def _add_sampling_arguments(parser: _LatentsParser) -> None:
    add = parser.add_for
    add(
        "build decode",
        "--vectors",
        type=read_path,
        metavar="NPY",
        help="a vector for each text, instead of embedding it",
    )
    add("decode encode", "--text", action="append", help="a text; may be repeated")
    add("eval", "--data", type=read_path, metavar="PAIRS", help="a folder of pairs")
    add(
        "sample eval",
        "--samples",
        type=at_least(1),
        help="how many; without it, 4 texts, or 1000 held-out pairs",
    )
    add(
        "decode encode sample eval",
        "--steps",
        type=at_least(1),
        help="denoising steps; without it 8, for encode 10, for sample 24",
    )
    add(
        "decode sample eval",
        "--temperature",
        type=at_least(0.0),
        help="0 takes the likeliest tokens, and is the default but for sample, where it is 1",
    )
    add("decode encode eval", "--guidance", type=at_least(0.0), default=1.0, help="classifier-free guidance")
    add("decode encode sample eval", "--seed", type=at_least(0), default=0, help="seed of what is drawn")
    add(
        "decode eval",
        "--correct",
        type=at_least(0),
        default=0,
        metavar="ROUNDS",
        help="rounds of embedding what was decoded, masking some of it and filling it in again",
    )
    add("decode eval", "--num_lengths", type=at_least(1), default=1, help="how many likely lengths to try")
    add("decode sample", "--live", action="store_true", help="show every denoising step of the first text")


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
    module = importlib.import_module(f"crosstune.cli.{_MODULES.get(own.action, 'latents_use')}")
    return int(getattr(module, f"run_{own.action}")(own))
