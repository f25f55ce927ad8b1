"""Correct decoded texts: mask and refill tokens, and keep the text whose embedding is nearest to the vector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from crosstune.recipes.latent_diffusion.encoders import Encoder
from crosstune.recipes.latent_diffusion.settings import Decoded, DecodeOptions, OnStep
from crosstune.recipes.latent_diffusion.vocabulary import MASK, PAD, Vocabulary

if TYPE_CHECKING:
    from crosstune.recipes.latent_diffusion.torch_parts_sampling import Sampler


_LENGTHS = 4
"""Number of likely lengths to decode at first."""
_TEMPERATURE, _FILL_STEPS = 0.8, 4
"""Options for filling in the masked tokens again."""


@dataclass(kw_only=True)
class Best:
    """The best text of each row so far, with its cosine to the vector."""

    tokens: NDArray[Any]
    lengths: NDArray[Any]
    scores: NDArray[Any]
    cosine: NDArray[np.float32]


def correct_texts(
    sampler: Sampler,
    encoder: Encoder,
    vocabulary: Vocabulary,
    latents: NDArray[Any],
    *,
    options: DecodeOptions,
    rounds: int,
    candidates: int = 8,
    on_step: OnStep | None = None,
) -> Iterator[Best]:
    """Yield the best texts after decoding and after each round of correction with `candidates` proposals per text.

    The best text has the embedding with the highest cosine to the vector; no reference is used.
    """
    random = np.random.default_rng(options.seed)
    count, width = len(latents), sampler.settings.max_tokens
    best = Best(
        tokens=np.zeros((count, width), np.int64),
        lengths=np.ones(count, np.int64),
        scores=np.zeros((count, width), np.float32),
        cosine=np.full(count, -2.0, np.float32),
    )
    order = np.argsort(-sampler.length_scores(latents), axis=1)[:, :_LENGTHS] + 1
    for place in range(order.shape[1]):
        shown = on_step if place == 0 else None
        found = sampler.decode(latents, options=options, lengths=order[:, place], on_step=shown)
        _keep(best, found, np.arange(count), _cosines(encoder, vocabulary, found.tokens, latents))
    yield best
    for number in range(rounds):
        share = 0.6 - 0.45 * number / max(1, rounds - 1)
        tokens, lengths, rows = propose(best, random, candidates, share=share)
        seed = options.seed + number + 1
        fill = replace(options, steps=_FILL_STEPS, temperature=_TEMPERATURE, seed=seed)
        found = sampler.fill(tokens, lengths, latents[rows], options=fill)
        _keep(best, found, rows, _cosines(encoder, vocabulary, found.tokens, latents[rows]))
        yield best


def propose(
    best: Best, random: np.random.Generator, candidates: int, *, share: float
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return copies of each text with about this fraction of tokens masked, mostly improbable tokens.

    A third of the copies are one token shorter or longer.
    """
    rows = np.repeat(np.arange(len(best.lengths)), candidates)
    tokens, lengths, scores = best.tokens[rows].copy(), best.lengths[rows].copy(), best.scores[rows].copy()
    kind, width = random.integers(6, size=len(rows)), tokens.shape[1]
    for row in np.nonzero(kind < 2)[0]:
        place, size = int(random.integers(lengths[row])), int(lengths[row])
        if kind[row] == 0 and size < width:
            for values in (tokens, scores):  # a score belongs to its token
                values[row, place + 1 : size + 1] = values[row, place:size].copy()
            tokens[row, place], scores[row, place] = MASK, 0.0
            lengths[row] += 1
        elif kind[row] == 1 and size > 1:
            for values in (tokens, scores):
                values[row, place : size - 1] = values[row, place + 1 : size].copy()
            tokens[row, size - 1], scores[row, size - 1] = PAD, 0.0
            lengths[row] -= 1
    real = np.arange(width) < lengths[:, None]
    chance = share * (1.5 - np.clip(scores, 0, 1))
    masked = (random.random(tokens.shape) < chance) & real
    masked[np.arange(len(rows)), random.integers(lengths)] = True  # at least one
    tokens[masked] = MASK
    return tokens, lengths, rows


def _cosines(
    encoder: Encoder, vocabulary: Vocabulary, tokens: NDArray[Any], latents: NDArray[Any]
) -> NDArray[np.float32]:
    texts = vocabulary.decode_batch(tokens)
    different = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    vectors = encoder.encode(list(different))[[different[text] for text in texts]]
    return (vectors * np.asarray(latents, np.float32)).sum(-1)


def _keep(best: Best, found: Decoded, rows: NDArray[Any], cosines: NDArray[np.float32]) -> None:
    """Replace texts by candidates with a higher cosine."""
    width = found.tokens.shape[1]
    order = np.argsort(cosines, kind="stable")  # ascending: the best candidate of a row is written last
    order = order[cosines[order] > best.cosine[rows[order]]]
    target = rows[order]
    best.tokens[target] = PAD
    best.tokens[target, :width] = found.tokens[order]
    best.scores[target, :width] = found.scores[order]
    best.lengths[target] = found.lengths[order]
    best.cosine[target] = cosines[order]
