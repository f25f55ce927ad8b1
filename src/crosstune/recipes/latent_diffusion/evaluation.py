"""Evaluate a trained model on held-out pairs: decoding with controls, correction, encoding, sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from crosstune.core.errors import UserError
from crosstune.recipes.latent_diffusion import scores
from crosstune.recipes.latent_diffusion.correct import CorrectOptions, decode_and_correct
from crosstune.recipes.latent_diffusion.encoders import Encoder
from crosstune.recipes.latent_diffusion.pair_folder import Pairs
from crosstune.recipes.latent_diffusion.sampling import DecodeOptions
from crosstune.recipes.latent_diffusion.trained import Trained


@dataclass(frozen=True, kw_only=True)
class EvalRequest:
    samples: int = 1000
    decode: DecodeOptions = field(default_factory=DecodeOptions)
    correct: CorrectOptions | None = None
    """Set to decode by correction as well, which needs the encoder."""
    encode_steps: int = 10
    show: int = 8
    on_stage: Callable[[str], None] = print


def evaluate(
    trained: Trained, pairs: Pairs, *, encoder: Encoder | None, request: EvalRequest
) -> dict[str, Any]:
    """Return the scores of the first held-out rows, and some of the texts."""
    scores.require_sacrebleu()
    rows = slice(0, request.samples)
    latents = np.asarray(pairs.latents[rows], np.float32)
    if not len(latents):
        raise UserError(
            "There are no held-out pairs to evaluate on.", do="build them with a larger --validation_share"
        )
    references = trained.vocabulary.normalise(pairs.texts[rows])
    modes = set(trained.facts["modes"])
    result: dict[str, Any] = {"samples": len(latents)}
    if modes != {"t2l"}:
        request.on_stage("decoding")
        result |= _decoded(trained, pairs, latents, references, encoder=encoder, request=request)
    if modes != {"l2t"}:
        request.on_stage("encoding")
        tokens, lengths = trained.tokens_of(pairs.texts[rows])
        found = trained.sampler.encode(tokens, lengths, steps=request.encode_steps)
        result["encode"] = {
            "cosine": scores.cosine(found, latents),
            "shuffled_cosine": scores.cosine(found, np.roll(latents, 1, axis=0)),
            "retrieval_at_1": scores.retrieval(found, latents),
        }
    if "unconditional" in modes:
        request.on_stage("sampling")
        result["sampled"] = _sampled(trained, len(latents), encoder=encoder, request=request)
    return result


def _sampled(
    trained: Trained, count: int, *, encoder: Encoder | None, request: EvalRequest
) -> dict[str, float]:
    """Score texts and vectors that were made together from noise: how many differ, and whether they belong together."""
    options = replace(request.decode, temperature=request.decode.temperature or 1.0)
    found = trained.sampler.generate(count, options=options)
    texts = trained.vocabulary.decode_batch(found.tokens)
    result = {"different_texts": len(set(texts)) / len(texts)}
    if encoder is not None:
        vectors = encoder.encode(texts)
        result["cosine"] = scores.cosine(vectors, found.vectors)
        result["shuffled_cosine"] = scores.cosine(vectors, np.roll(found.vectors, 1, axis=0))
    return result


def _decoded(
    trained: Trained,
    pairs: Pairs,
    latents: Any,
    references: list[str],
    *,
    encoder: Encoder | None,
    request: EvalRequest,
) -> dict[str, Any]:
    sampler, vocabulary = trained.sampler, trained.vocabulary
    tokens, lengths = trained.tokens_of(pairs.texts[: len(latents)])

    def accuracy(vectors: Any) -> float:
        return scores.one_shot_accuracy(sampler, vectors, tokens, lengths)

    def decode(vectors: Any) -> list[str]:
        return vocabulary.decode_batch(sampler.decode(vectors, options=request.decode).tokens)

    shuffled = np.roll(latents, 1, axis=0)
    texts = decode(latents)
    found: dict[str, Any] = {
        "nats_per_token": sampler.nats_per_token(tokens, lengths, latents, seed=request.decode.seed),
        "nats_per_token_shuffled": sampler.nats_per_token(
            tokens, lengths, shuffled, seed=request.decode.seed
        ),
        "token_accuracy": accuracy(latents),
        "token_accuracy_shuffled": accuracy(shuffled),
        "token_accuracy_zero": accuracy(np.zeros_like(latents)),
        "single_pass": scores.text_scores(texts, references) | _embedded(encoder, texts, latents),
        "shuffled": scores.text_scores(decode(shuffled), references),
    }
    corrected = None
    if request.correct is not None and encoder is not None:
        request.on_stage("correcting")
        better = decode_and_correct(
            sampler,
            encoder,
            vocabulary,
            latents,
            options=request.decode,
            correct=request.correct,
            max_tokens=trained.settings.max_tokens,
        )
        corrected = vocabulary.decode_batch(better.tokens)
        found["corrected"] = scores.text_scores(corrected, references) | _embedded(
            encoder, corrected, latents
        )
    found["texts"] = [
        {"reference": references[row], "single_pass": texts[row]}
        | ({"corrected": corrected[row]} if corrected is not None else {})
        for row in range(min(request.show, len(texts)))
    ]
    return found


def _embedded(encoder: Encoder | None, texts: list[str], latents: Any) -> dict[str, float]:
    """Embed decoded texts again, and compare them with the vectors that they were decoded from."""
    if encoder is None:
        return {}
    vectors = encoder.encode(texts)
    return {"cosine": scores.cosine(vectors, latents), "retrieval_at_1": scores.retrieval(vectors, latents)}
