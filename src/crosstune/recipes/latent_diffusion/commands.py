"""Decode vectors, encode texts, make both from noise, and evaluate with a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.config.load import cache_override
from crosstune.core.errors import UserError
from crosstune.recipes.latent_diffusion.correct import CorrectOptions, OnRound, decode_and_correct
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
    options: DecodeOptions
    encoder: str | None = None
    rounds: int = 0
    """Rounds of correction."""
    device: str | None = None
    on_step: OnStep | None = None
    on_round: OnRound | None = None


def decode(trained: Trained, request: DecodeRequest) -> dict[str, Any]:
    """Return the decoded texts, each with its cosine where it was embedded again, and notes."""
    trained.check_mode("l2t")
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
    if request.rounds:
        assert encoder is not None
        found = decode_and_correct(
            trained.sampler,
            encoder,
            trained.vocabulary,
            latents,
            options=request.options,
            correct=CorrectOptions(rounds=request.rounds),
            max_tokens=trained.settings.max_tokens,
            on_step=request.on_step,
            on_round=request.on_round,
        )
    else:
        found = trained.sampler.decode(latents, options=request.options, on_step=request.on_step)
    return {"texts": _rows(trained, found.tokens, latents, encoder=encoder), "notes": notes}


def sample(
    trained: Trained,
    count: int,
    *,
    options: DecodeOptions,
    encoder: str | None = None,
    device: str | None = None,
    out: Path | None = None,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Return new texts, each with the cosine between its embedding and the vector made with it, where the encoder is
    known; write the vectors to an .npy file if one is named."""
    trained.check_mode("unconditional")
    opened = None
    if trained.can_embed(encoder):
        opened = trained.encoder(encoder, cache=cache_override(), device=device)
    found = trained.sampler.generate(count, options=options, on_step=on_step)
    _write_vectors(out, found.vectors)
    return {"texts": _rows(trained, found.tokens, found.vectors, encoder=opened)}


def _rows(trained: Trained, tokens: Any, latents: Any, *, encoder: Encoder | None) -> list[dict[str, Any]]:
    """Return the texts of token ids, with their cosine to the vectors if they can be embedded."""
    texts = trained.vocabulary.decode_batch(tokens)
    if encoder is None:
        return [{"text": text} for text in texts]
    cosines = (encoder.encode(texts) * latents).sum(-1).tolist()
    return [{"text": text, "cosine": cosine} for text, cosine in zip(texts, cosines, strict=True)]


def _write_vectors(path: Path | None, vectors: Any) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:  # np.save would add .npy to another name
            np.save(file, vectors)
    except OSError as error:
        raise UserError(
            f"The vectors cannot be written to {path}.",
            why=f"{error.strerror or error}.",
            do="give another --out FILE",
        ) from error


def encode(
    trained: Trained, texts: list[str], *, steps: int, guidance: float, seed: int, out: Path | None
) -> dict[str, Any]:
    """Return a vector for each text, and write them to an .npy file if one is named."""
    trained.check_mode("t2l")
    tokens, lengths = trained.tokens_of(texts)
    vectors = trained.sampler.encode(tokens, lengths, steps=steps, guidance=guidance, seed=seed)
    _write_vectors(out, vectors)
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
    held_out = pairs.splits.get("validation", pairs.splits["train"].part(0, 0))
    return evaluate(trained, held_out, encoder=opened, request=request)
