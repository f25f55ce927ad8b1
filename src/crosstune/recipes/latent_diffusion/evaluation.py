"""Score a trained model on held-out pairs (decoding, correction, encoding, sampling), and define the scores."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.recipes.latent_diffusion.correction import correct_texts
from crosstune.recipes.latent_diffusion.encoders import Encoder
from crosstune.recipes.latent_diffusion.pair_folder import Pairs, open_pairs
from crosstune.recipes.latent_diffusion.settings import DecodeOptions
from crosstune.recipes.latent_diffusion.trained import Trained

if TYPE_CHECKING:
    from crosstune.recipes.latent_diffusion.torch_parts_sampling import Sampler

RETRIEVAL_AMONG = 1000
_SHOWN = 8
"""Texts in the result of an evaluation."""


def evaluate(
    trained: Trained,
    data: Path,
    *,
    options: DecodeOptions,
    rounds: int = 0,
    samples: int = 1000,
    on_stage: Callable[[str], None],
) -> dict[str, Any]:
    """Return the scores of the first `samples` held-out pairs of a folder, and some of the texts.

    If the encoder is not known, texts are neither corrected nor embedded.
    """
    folder = open_pairs(data)
    trained.check_data(folder)
    opened = trained.find_encoder()
    pairs = folder.rows_of("validation", samples)
    latents = np.asarray(pairs.latents, np.float32)
    if not has_sacrebleu():
        raise UserError("BLEU and chrF need sacrebleu.", do="pip install 'crosstune[latents]'")
    if not len(latents):
        raise UserError(
            "There are no held-out pairs to evaluate on.", do="build them with a larger --validation_share"
        )
    modes = set(trained.facts["modes"])
    result: dict[str, Any] = {"samples": len(latents)}
    if modes != {"t2l"}:
        on_stage("decoding")
        texts = trained.vocabulary.normalize(pairs.texts)
        result |= _decoded(trained, pairs, latents, texts, encoder=opened, options=options)
        if rounds and opened is not None:
            on_stage("correcting")
            parts = (trained.sampler, opened, trained.vocabulary)
            *_, best = correct_texts(*parts, latents, options=options, rounds=rounds)
            corrected = trained.vocabulary.decode_batch(best.tokens)
            result["corrected"] = text_scores(corrected, texts) | _embedded(opened, corrected, latents)
            for row, text in zip(result["texts"], corrected, strict=False):
                row["corrected"] = text
        result["texts"] = result.pop("texts")  # printed last
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
    """Score texts decoded without correction; as controls, decode shuffled and zero vectors."""
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


def _sampled(
    trained: Trained, count: int, *, encoder: Encoder | None, options: DecodeOptions
) -> dict[str, float]:
    """Score texts and vectors generated from noise: the fraction of distinct texts, and their cosine."""
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
    """Compare the embeddings of decoded texts with the vectors they were decoded from."""
    if encoder is None:
        return {}
    vectors = encoder.encode(texts)
    return {"cosine": cosine(vectors, latents), "retrieval_at_1": retrieval(vectors, latents)}


def has_sacrebleu() -> bool:
    return importlib.util.find_spec("sacrebleu") is not None


def text_scores(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return BLEU and chrF, from 0 to 100, and the fraction of texts that equal their reference."""
    import sacrebleu

    return {
        "bleu": float(sacrebleu.corpus_bleu(list(texts), [list(references)]).score),
        "chrf": float(sacrebleu.corpus_chrf(list(texts), [list(references)]).score),
        "exact_match": exact_match(texts, references),
    }


def exact_match(texts: Sequence[str], references: Sequence[str]) -> float:
    return float(np.mean([text == reference for text, reference in zip(texts, references, strict=True)]))


def token_accuracy(predicted: NDArray[Any], tokens: NDArray[Any], lengths: NDArray[Any]) -> float:
    """Return the fraction of correctly predicted tokens, ignoring padding."""
    width = min(predicted.shape[1], tokens.shape[1])
    real = np.arange(width) < np.asarray(lengths)[:, None]
    right = (predicted[:, :width] == tokens[:, :width]) & real
    return float(right.sum() / max(1, int(np.asarray(lengths).sum())))


def one_shot_accuracy(
    sampler: Sampler, latents: NDArray[Any], tokens: NDArray[Any], lengths: NDArray[Any]
) -> float:
    """Return the token accuracy of one decoding step from fully masked text of known lengths."""
    found = sampler.decode(latents, options=DecodeOptions(steps=1), lengths=lengths)
    return token_accuracy(found.tokens, tokens, lengths)


def cosine(one: NDArray[Any], other: NDArray[Any]) -> float:
    """Return the mean cosine of corresponding vectors, all of norm 1."""
    return float((np.asarray(one, np.float32) * np.asarray(other, np.float32)).sum(-1).mean())


def retrieval(queries: NDArray[Any], keys: NDArray[Any]) -> float:
    """Return how often the nearest key of a query is its own, among at most `RETRIEVAL_AMONG` keys."""
    hits = 0
    for start in range(0, len(queries), RETRIEVAL_AMONG):
        part = slice(start, start + RETRIEVAL_AMONG)
        near = np.asarray(queries[part], np.float32) @ np.asarray(keys[part], np.float32).T
        hits += int((near.argmax(1) == np.arange(len(near))).sum())
    return hits / max(1, len(queries))
