"""Decode vectors, encode texts, and sample both from noise with a trained model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.config.load import cache_override
from crosstune.core.errors import UserError
from crosstune.recipes.latent_diffusion.correct import CorrectOptions, correct_texts
from crosstune.recipes.latent_diffusion.encoders import Encoder
from crosstune.recipes.latent_diffusion.sampling import DecodeOptions, OnStep
from crosstune.recipes.latent_diffusion.trained import Trained


def decode(
    trained: Trained,
    *,
    vectors: Path | None,
    texts: list[str],
    options: DecodeOptions,
    encoder: str | None = None,
    rounds: int = 0,
    device: str | None = None,
    on_step: OnStep | None = None,
    on_round: Callable[[int, float], None] | None = None,
) -> dict[str, Any]:
    """Decode vectors of an .npy file, or embed texts and decode those, with `rounds` of correction.

    Return the texts, with their cosine if the encoder was opened, and notes.
    """
    trained.check_mode("l2t")
    opened: Encoder | None = None
    if texts or rounds:
        opened = trained.encoder(encoder, cache=cache_override(), device=device)
    notes: list[str] = []
    if vectors is not None:
        latents, changed = trained.vectors_of(vectors)
        if changed:
            notes.append(f"{changed:,} vectors did not have norm 1 and were normalised")
    else:
        assert opened is not None
        latents = opened.encode(texts)
    tokens: Any = None
    if rounds:
        assert opened is not None
        correct, vocabulary = CorrectOptions(rounds=rounds), trained.vocabulary
        for number, best in enumerate(
            correct_texts(
                trained.sampler,
                opened,
                vocabulary,
                latents,
                options=options,
                correct=correct,
                on_step=on_step,
            )
        ):
            tokens = best.tokens
            if number and on_round is not None:
                on_round(number, float(best.cosine.mean()))
    else:
        tokens = trained.sampler.decode(latents, options=options, on_step=on_step).tokens
    return {"texts": _rows(trained, tokens, latents, encoder=opened), "notes": notes}


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
    """Return new texts, with the cosine of their embedding and their vector if the encoder is known. Write the vectors
    to `out`, an .npy file."""
    trained.check_mode("unconditional")
    opened = None
    if trained.can_embed(encoder):
        opened = trained.encoder(encoder, cache=cache_override(), device=device)
    found = trained.sampler.generate(count, options=options, on_step=on_step)
    _write_vectors(out, found.vectors)
    return {"texts": _rows(trained, found.tokens, found.vectors, encoder=opened)}


def encode(
    trained: Trained, texts: list[str], *, steps: int, guidance: float, seed: int, out: Path | None
) -> dict[str, Any]:
    """Return a vector for each text. Write them to `out`, an .npy file."""
    trained.check_mode("t2l")
    tokens, lengths = trained.tokens_of(texts)
    vectors = trained.sampler.encode(tokens, lengths, steps=steps, guidance=guidance, seed=seed)
    _write_vectors(out, vectors)
    return {"vectors": vectors.tolist()}


def _rows(trained: Trained, tokens: Any, latents: Any, *, encoder: Encoder | None) -> list[dict[str, Any]]:
    """Return the texts of token ids, with their cosine to the vectors if they can be embedded."""
    texts = trained.vocabulary.decode_batch(tokens)
    if encoder is None:
        return [{"text": text} for text in texts]
    cosines = (encoder.encode(texts) * latents).sum(-1).tolist()
    return [{"text": text, "cosine": near} for text, near in zip(texts, cosines, strict=True)]


def _write_vectors(path: Path | None, vectors: Any) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:  # np.save would add .npy to a name without it
            np.save(file, vectors)
    except OSError as error:
        raise UserError(
            f"The vectors cannot be written to {path}.",
            why=f"{error.strerror or error}.",
            do="give another --out FILE",
        ) from error
