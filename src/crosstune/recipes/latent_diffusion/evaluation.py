"""Evaluate a trained model on held-out pairs: decoding with controls, correction, encoding, sampling."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from crosstune.config.load import cache_override
from crosstune.core.errors import UserError
from crosstune.recipes.latent_diffusion.encoders import Encoder
from crosstune.recipes.latent_diffusion.pair_folder import Pairs, open_pairs
from crosstune.recipes.latent_diffusion.settings import DecodeOptions
from crosstune.recipes.latent_diffusion.trained import CorrectOptions, Trained, correct_texts

if TYPE_CHECKING:
    from crosstune.recipes.latent_diffusion.torch_parts_sampling import Sampler
from crosstune.recipes.latent_diffusion.settings import OnStep

RETRIEVAL_AMONG = 1000


def has_sacrebleu() -> bool:
    return importlib.util.find_spec("sacrebleu") is not None


def require_sacrebleu() -> None:
    if not has_sacrebleu():
        raise UserError("BLEU and chrF need sacrebleu.", do="pip install 'crosstune[latents]'")


def text_scores(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return BLEU and chrF, from 0 to 100, and the share of texts that equal their reference."""
    require_sacrebleu()
    import sacrebleu

    return {
        "bleu": float(sacrebleu.corpus_bleu(list(texts), [list(references)]).score),
        "chrf": float(sacrebleu.corpus_chrf(list(texts), [list(references)]).score),
        "exact_match": exact_match(texts, references),
    }


def exact_match(texts: Sequence[str], references: Sequence[str]) -> float:
    return float(np.mean([text == reference for text, reference in zip(texts, references, strict=True)]))


def token_accuracy(predicted: NDArray[Any], tokens: NDArray[Any], lengths: NDArray[Any]) -> float:
    """Return the share of correctly predicted tokens, without padding."""
    width = min(predicted.shape[1], tokens.shape[1])
    real = np.arange(width) < np.asarray(lengths)[:, None]
    right = (predicted[:, :width] == tokens[:, :width]) & real
    return float(right.sum() / max(1, int(np.asarray(lengths).sum())))


def one_shot_accuracy(
    sampler: Sampler, latents: NDArray[Any], tokens: NDArray[Any], lengths: NDArray[Any]
) -> float:
    """Return the token accuracy of one step from fully masked text of the right lengths."""
    found = sampler.decode(latents, options=DecodeOptions(steps=1), lengths=lengths)
    return token_accuracy(found.tokens, tokens, lengths)


def cosine(one: NDArray[Any], other: NDArray[Any]) -> float:
    """Return the mean cosine of pairs of vectors of norm 1."""
    return float((np.asarray(one, np.float32) * np.asarray(other, np.float32)).sum(-1).mean())


def retrieval(queries: NDArray[Any], keys: NDArray[Any], *, among: int = RETRIEVAL_AMONG) -> float:
    """Return how often a query's own key is the nearest, in groups of at most `among` keys."""
    hits = 0
    for start in range(0, len(queries), among):
        part = slice(start, start + among)
        near = np.asarray(queries[part], np.float32) @ np.asarray(keys[part], np.float32).T
        hits += int((near.argmax(1) == np.arange(len(near))).sum())
    return hits / max(1, len(queries))


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
