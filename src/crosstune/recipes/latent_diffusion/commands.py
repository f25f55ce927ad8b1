"""Decode vectors, encode texts and evaluate with a trained model: what `crosstune latents` does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.config.load import cache_override
from crosstune.recipes.latent_diffusion.correct import CorrectOptions, decode_and_correct
from crosstune.recipes.latent_diffusion.encoders import Encoder
from crosstune.recipes.latent_diffusion.evaluation import EvalRequest, evaluate
from crosstune.recipes.latent_diffusion.pair_folder import open_pairs
from crosstune.recipes.latent_diffusion.sampling import DecodeOptions, OnStep
from crosstune.recipes.latent_diffusion.trained import Trained


@dataclass(frozen=True, kw_only=True)
class DecodeRequest:
    vectors: Path | None
    texts: list[str]
    """Texts to embed and decode, instead of vectors."""
    encoder: str | None = None
    steps: int = 8
    temperature: float = 0.0
    guidance: float = 1.0
    num_lengths: int = 1
    seed: int = 0
    rounds: int = 0
    """Rounds of correction."""
    device: str | None = None
    on_step: OnStep | None = None


def decode(trained: Trained, request: DecodeRequest) -> dict[str, Any]:
    """Return the decoded texts, each with its cosine where it was embedded again, and notes."""
    trained.needs_mode(text=True)
    encoder: Encoder | None = None
    if request.texts or request.rounds:
        encoder = trained.encoder(request.encoder, cache=cache_override(), device=request.device)
    notes: list[str] = []
    if request.vectors is not None:
        latents, changed = trained.vectors_of(request.vectors)
        if changed:
            notes.append(f"{changed:,} vectors did not have norm 1 and were normalised")
    else:
        assert encoder is not None
        latents = encoder.encode(request.texts)
    options = DecodeOptions(
        steps=request.steps,
        temperature=request.temperature,
        guidance=request.guidance,
        num_lengths=request.num_lengths,
        seed=request.seed,
    )
    if request.rounds:
        assert encoder is not None
        found = decode_and_correct(
            trained.sampler,
            encoder,
            trained.vocabulary,
            latents,
            options=options,
            correct=CorrectOptions(rounds=request.rounds),
            max_tokens=trained.settings.max_tokens,
        )
    else:
        found = trained.sampler.decode(latents, options=options, on_step=request.on_step)
    texts = trained.vocabulary.decode_batch(found.tokens)
    rows: list[dict[str, Any]] = [{"text": text} for text in texts]
    if encoder is not None:
        for row, cosine in zip(rows, (encoder.encode(texts) * latents).sum(-1).tolist(), strict=True):
            row["cosine"] = cosine
    return {"texts": rows, "notes": notes}


def encode(
    trained: Trained, texts: list[str], *, steps: int, guidance: float, seed: int, out: Path | None
) -> dict[str, Any]:
    """Return a vector for each text, and write them to an .npy file if one is named."""
    trained.needs_mode(text=False)
    tokens, lengths = trained.tokens_of(texts)
    vectors = trained.sampler.encode(tokens, lengths, steps=steps, guidance=guidance, seed=seed)
    if out is not None:
        with out.open("wb") as file:  # np.save would add .npy to another name
            np.save(file, vectors)
    return {"vectors": vectors.tolist()}


def evaluate_folder(
    trained: Trained, data: Path, *, encoder: str | None, device: str | None, request: EvalRequest
) -> dict[str, Any]:
    """Evaluate on the held-out pairs of a folder; without the encoder of its vectors, nothing is embedded again."""
    pairs = open_pairs(data)
    trained.check_data(pairs)
    opened = None
    if trained.can_embed(encoder):
        opened = trained.encoder(encoder, cache=cache_override(), device=device)
    return evaluate(trained, pairs.splits["validation"], encoder=opened, request=request)
