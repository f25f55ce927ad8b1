"""`crosstune latents build` and `export`: make folders of (text, vector) pairs, and write them in other layouts."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from crosstune.cli.arguments import print_json, read_path
from crosstune.cli.ending import shown_path
from crosstune.cli.output import print_line
from crosstune.config.load import cache_override
from crosstune.core.errors import EXIT_DONE, UserError


def run_build(own: argparse.Namespace) -> int:
    from crosstune.cli.count_line import CountLine
    from crosstune.recipes.latent_diffusion.build import BuildRequest, build
    from crosstune.recipes.latent_diffusion.choose_rows import WriteOptions
    from crosstune.recipes.latent_diffusion.encoders import MINILM
    from crosstune.recipes.latent_diffusion.pair_folder import is_pair_folder

    if own.validation_share >= 1:
        raise UserError("--validation_share is 1 or more.", why="nothing would be left to train on.")
    if is_pair_folder(own.out) and not own.overwrite:
        raise UserError(
            f"{own.out} holds pairs already.",
            do="give another --out FOLDER, or replace them with --overwrite",
        )
    with CountLine() as line:
        facts = build(
            BuildRequest(
                source=own.target,
                out=own.out,
                encoder=own.encoder or MINILM,
                vectors=own.vectors,
                file=own.file,
                most_texts=own.max_texts,
                crops=own.crops,
                mixes=own.mixes,
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
                on_text=lambda stage, done, total: line.show(stage, done, total, unit="texts"),
            )
        )
    del facts["files"]
    if own.json:
        print_json({"folder": str(own.out), **facts})
        return EXIT_DONE
    for line_text in _built_lines(facts):
        print_line(line_text)
    print_line(f"pairs    {own.out}")
    folder = shlex.quote(shown_path(own.out))
    print_line(f"train    crosstune train --recipe latent_diffusion --dataset {folder}")
    return EXIT_DONE


def _built_lines(facts: dict[str, Any]) -> list[str]:
    splits = ", ".join(f"{count:,} {split}" for split, count in sorted(facts["splits"].items()))
    left = ", ".join(
        f"{count:,} {why.replace('_', ' ')}" for why, count in facts["left_out"].items() if count
    )
    lines = [
        f"texts    {splits}; at most {facts['max_tokens']} tokens, vocabulary {facts['vocabulary']:,}",
        f"vectors  {facts['dim']} dimensions, from {facts['encoder'].get('name')}",
    ]
    if left:
        lines.append(f"left out {left}")
    if count := facts["vectors_normalised_here"]:
        lines.append(f"note     {count:,} vectors did not have norm 1 and were normalised")
    return lines


def run_export(own: argparse.Namespace) -> int:
    from crosstune.recipes.latent_diffusion.layouts import write_layout
    from crosstune.recipes.latent_diffusion.pair_folder import open_pairs

    count = write_layout(open_pairs(read_path(own.target)), own.out, layout=own.layout)
    if own.json:
        print_json({"folder": str(own.out), "pairs": count, "layout": own.layout})
    else:
        print_line(f"wrote    {count:,} pairs as {own.layout} to {own.out}")
    return EXIT_DONE
