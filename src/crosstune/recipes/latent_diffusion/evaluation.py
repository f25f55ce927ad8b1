"""Evaluate a trained model on held-out pairs: decoding with controls, correction, encoding, sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.config.load import cache_override
from crosstune.core.errors import UserError
from crosstune.recipes.latent_diffusion.correct import CorrectOptions, correct_texts
from crosstune.recipes.latent_diffusion.encoders import Encoder
from crosstune.recipes.latent_diffusion.pair_folder import Pairs, open_pairs
from crosstune.recipes.latent_diffusion.sampling import DecodeOptions
from crosstune.recipes.latent_diffusion.scores import (
    cosine,
    one_shot_accuracy,
    require_sacrebleu,
    retrieval,
    text_scores,
)
from crosstune.recipes.latent_diffusion.trained import Trained

_SHOWN = 8
"""Texts in the result of an evaluation."""


def evaluate(
    trained: Trained,
    data: Path,
    *,
    options: DecodeOptions,
    rounds: int = 0,
    samples: int = 1000,
    encoder: str | None = None,
    device: str | None = None,
    on_stage: Callable[[str], None],
) -> dict[str, Any]:
    """Return the scores of the first held-out pairs of a folder, and some of the texts.

    `rounds` of correction need the encoder. Without it, texts are not embedded again.
    """
    folder = open_pairs(data)
    trained.check_data(folder)
    embeds = trained.can_embed(encoder)
    opened = trained.encoder(encoder, cache=cache_override(), device=device) if embeds else None
    pairs = folder.splits.get("validation", folder.splits["train"].part(0, 0)).part(0, samples)
    require_sacrebleu()
    latents = np.asarray(pairs.latents, np.float32)
    if not len(latents):
        raise UserError(
            "There are no held-out pairs to evaluate on.", do="build them with a larger --validation_share"
        )
    modes = set(trained.facts["modes"])
    result: dict[str, Any] = {"samples": len(latents)}
    if modes != {"t2l"}:
        on_stage("decoding")
        texts = trained.vocabulary.normalise(pairs.texts)
        result |= _decoded(trained, pairs, latents, texts, encoder=opened, options=options)
        if rounds and opened is not None:
            on_stage("correcting")
            result["corrected"], corrected = _corrected(
                trained, latents, texts, encoder=opened, options=options, rounds=rounds
            )
            for row, text in zip(result["texts"], corrected, strict=False):
                row["corrected"] = text
        result["texts"] = result.pop("texts")  # last
    if modes != {"l2t"}:
        on_stage("encoding")
        found = trained.sampler.encode(*trained.tokens_of(pairs.texts))
        result["encode"] = {
            "cosine": cosine(found, latents),
            "shuffled_cosine": cosine(found, np.roll(latents, 1, axis=0)),
            "retrieval_at_1": retrieval(found, latents),
        }
    if "unconditional" in modes:
        on_stage("sampling")
        result["sampled"] = _sampled(trained, len(latents), encoder=opened, options=options)
    return result


def _decoded(
    trained: Trained,
    pairs: Pairs,
    latents: Any,
    references: list[str],
    *,
    encoder: Encoder | None,
    options: DecodeOptions,
) -> dict[str, Any]:
    """Score texts decoded in one pass, beside those of shuffled and of zero vectors."""
    sampler, vocabulary = trained.sampler, trained.vocabulary
    tokens, lengths = trained.tokens_of(pairs.texts)

    def nats(vectors: Any) -> float:
        return sampler.nats_per_token(tokens, lengths, vectors, seed=options.seed)

    def accuracy(vectors: Any) -> float:
        return one_shot_accuracy(sampler, vectors, tokens, lengths)

    def decode(vectors: Any) -> list[str]:
        return vocabulary.decode_batch(sampler.decode(vectors, options=options).tokens)

    shuffled, texts = np.roll(latents, 1, axis=0), decode(latents)
    return {
        "nats_per_token": nats(latents),
        "nats_per_token_shuffled": nats(shuffled),
        "token_accuracy": accuracy(latents),
        "token_accuracy_shuffled": accuracy(shuffled),
        "token_accuracy_zero": accuracy(np.zeros_like(latents)),
        "single_pass": text_scores(texts, references) | _embedded(encoder, texts, latents),
        "shuffled": text_scores(decode(shuffled), references),
        "texts": [
            {"reference": reference, "single_pass": text}
            for reference, text in zip(references[:_SHOWN], texts, strict=False)
        ],
    }


def _corrected(
    trained: Trained,
    latents: Any,
    references: list[str],
    *,
    encoder: Encoder,
    options: DecodeOptions,
    rounds: int,
) -> tuple[dict[str, float], list[str]]:
    """Score texts decoded by correction."""
    *_, best = correct_texts(
        trained.sampler,
        encoder,
        trained.vocabulary,
        latents,
        options=options,
        correct=CorrectOptions(rounds=rounds),
    )
    texts = trained.vocabulary.decode_batch(best.tokens)
    return text_scores(texts, references) | _embedded(encoder, texts, latents), texts


def _sampled(
    trained: Trained, count: int, *, encoder: Encoder | None, options: DecodeOptions
) -> dict[str, float]:
    """Score texts and vectors made together from noise: how many differ, and whether they match."""
    options = replace(options, temperature=options.temperature or 1.0)
    found = trained.sampler.generate(count, options=options)
    texts = trained.vocabulary.decode_batch(found.tokens)
    result = {"different_texts": len(set(texts)) / len(texts)}
    if encoder is not None:
        vectors = encoder.encode(texts)
        result["cosine"] = cosine(vectors, found.vectors)
        result["shuffled_cosine"] = cosine(vectors, np.roll(found.vectors, 1, axis=0))
    return result


def _embedded(encoder: Encoder | None, texts: list[str], latents: Any) -> dict[str, float]:
    """Embed decoded texts, and compare them with their vectors."""
    if encoder is None:
        return {}
    vectors = encoder.encode(texts)
    return {"cosine": cosine(vectors, latents), "retrieval_at_1": retrieval(vectors, latents)}
