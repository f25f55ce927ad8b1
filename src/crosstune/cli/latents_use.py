"""`crosstune latents decode`, `encode`, `sample` and `eval`: use a trained latent-diffusion model."""

from __future__ import annotations

import argparse
from typing import Any

from crosstune.cli.arguments import print_json, read_path
from crosstune.cli.output import Output, print_line
from crosstune.core.errors import EXIT_DONE
from crosstune.recipes.latent_diffusion.commands import decode, encode, sample
from crosstune.recipes.latent_diffusion.evaluation import evaluate
from crosstune.recipes.latent_diffusion.sampling import DecodeOptions, OnStep
from crosstune.recipes.latent_diffusion.trained import Trained, open_trained


def run_decode(own: argparse.Namespace) -> int:
    trained, output = _open(own), Output()
    live = own.live and not own.json

    def show_round(done: int, cosine: float) -> None:
        output.line(f"round {done:>2}/{own.correct}  mean cosine {cosine:.4f}")

    found = decode(
        trained,
        vectors=own.vectors,
        texts=own.text or [],
        options=_options(own, steps=8),
        encoder=own.encoder,
        rounds=own.correct,
        device=own.device,
        on_step=_live(trained, output) if live else None,
        on_round=show_round if live else None,
    )
    if own.json:
        print_json(found)
        return EXIT_DONE
    for note in found["notes"]:
        output.line(f"note     {note}")
    for row in found["texts"]:
        print_line(row["text"])
    return EXIT_DONE


def run_encode(own: argparse.Namespace) -> int:
    found = encode(
        _open(own), own.text, steps=own.steps or 10, guidance=own.guidance, seed=own.seed, out=own.out
    )
    if own.json:
        print_json(found)
        return EXIT_DONE
    for row in found["vectors"]:
        print_line(" ".join(f"{value:.4f}" for value in row))
    if own.out is not None:
        print_line(f"wrote    {len(found['vectors'])} vectors to {own.out}")
    return EXIT_DONE


def run_sample(own: argparse.Namespace) -> int:
    trained, output = _open(own), Output()
    found = sample(
        trained,
        own.samples or 4,
        options=_options(own, steps=24, temperature=1.0),
        encoder=own.encoder,
        device=own.device,
        out=own.out,
        on_step=_live(trained, output) if own.live and not own.json else None,
    )
    if own.json:
        print_json(found)
        return EXIT_DONE
    for row in found["texts"]:
        print_line(row["text"])
    if own.out is not None:
        output.line(f"wrote    {len(found['texts'])} vectors to {own.out}")
    return EXIT_DONE


def run_eval(own: argparse.Namespace) -> int:
    output = Output()
    found = evaluate(
        _open(own),
        own.data,
        options=_options(own, steps=8),
        rounds=own.correct,
        samples=own.samples or 1000,
        encoder=own.encoder,
        device=own.device,
        on_stage=lambda stage: output.line(f"{stage} ..."),
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


def _open(own: argparse.Namespace) -> Trained:
    return open_trained(read_path(own.target), device=own.device)


def _options(own: argparse.Namespace, *, steps: int, temperature: float = 0.0) -> DecodeOptions:
    return DecodeOptions(
        steps=own.steps or steps,
        temperature=own.temperature if own.temperature is not None else temperature,
        guidance=own.guidance,
        num_lengths=own.num_lengths,
        seed=own.seed,
    )


def _live(trained: Trained, output: Output) -> OnStep:
    """Return a function that prints the first text after each denoising step, a line for each."""

    def show(step: int, steps: int, tokens: Any) -> None:
        output.line(f"step {step:>3}/{steps}  {trained.vocabulary.show(tokens[0].tolist())}")

    return show
