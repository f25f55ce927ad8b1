"""Decode by correction: embed what was decoded, mask some of it, fill it in again, and keep what is nearest to the
vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.recipes.latent_diffusion.encoders import Encoder
from crosstune.recipes.latent_diffusion.sampling import Decoded, DecodeOptions, OnStep, Samples
from crosstune.recipes.latent_diffusion.vocabulary import MASK, PAD, Vocabulary

OnRound = Callable[[int, int, float], None]
"""Called with the round, the number of rounds, and the mean cosine so far."""
GoesOn = Callable[[Decoded], bool]
"""Called after each round with the texts so far; returns whether another round may follow."""


@dataclass(frozen=True, kw_only=True)
class CorrectOptions:
    rounds: int = 8
    candidates: int = 8
    """Proposals for each text in each round."""
    lengths: int = 4
    """The number of likely lengths that are tried at first."""
    temperature: float = 0.8
    fill_steps: int = 4


@dataclass(kw_only=True)
class _Best:
    """The best text of each row so far."""

    tokens: NDArray[Any]
    lengths: NDArray[Any]
    scores: NDArray[Any]
    cosine: NDArray[np.float32]

    def decoded(self) -> Decoded:
        return Decoded(tokens=self.tokens, lengths=self.lengths, scores=self.scores)


def decode_and_correct(
    sampler: Samples,
    encoder: Encoder,
    vocabulary: Vocabulary,
    latents: NDArray[Any],
    *,
    options: DecodeOptions,
    correct: CorrectOptions,
    max_tokens: int,
    on_step: OnStep | None = None,
    on_round: OnRound | None = None,
    goes_on: GoesOn | None = None,
) -> Decoded:
    """Return the nearest text found for each vector. No reference is looked at: the vector itself is the judge."""
    random = np.random.default_rng(options.seed)
    best = _first(
        sampler,
        encoder,
        vocabulary,
        latents,
        options=options,
        correct=correct,
        max_tokens=max_tokens,
        on_step=on_step,
    )
    for number in range(correct.rounds):
        share = 0.6 - 0.45 * number / max(1, correct.rounds - 1)
        tokens, lengths, rows = _propose(best, random, correct.candidates, share=share, max_tokens=max_tokens)
        fill = DecodeOptions(
            steps=correct.fill_steps,
            temperature=correct.temperature,
            guidance=options.guidance,
            seed=options.seed + number + 1,
        )
        found = sampler.fill(tokens, lengths, latents[rows], options=fill)
        _keep(best, found, rows, _cosines(encoder, vocabulary, found.tokens, latents[rows]))
        if on_round is not None:
            on_round(number + 1, correct.rounds, float(best.cosine.mean()))
        if goes_on is not None and not goes_on(best.decoded()):
            break
    return best.decoded()


def _first(
    sampler: Samples,
    encoder: Encoder,
    vocabulary: Vocabulary,
    latents: NDArray[Any],
    *,
    options: DecodeOptions,
    correct: CorrectOptions,
    max_tokens: int,
    on_step: OnStep | None,
) -> _Best:
    """Decode with each of the likeliest lengths, and keep the nearest."""
    count = len(latents)
    best = _Best(
        tokens=np.zeros((count, max_tokens), np.int64),
        lengths=np.ones(count, np.int64),
        scores=np.zeros((count, max_tokens), np.float32),
        cosine=np.full(count, -2.0, np.float32),
    )
    order = np.argsort(-sampler.length_scores(latents), axis=1)[:, : correct.lengths] + 1
    rows = np.arange(count)
    for place in range(order.shape[1]):
        shown = on_step if place == 0 else None
        found = sampler.decode(latents, options=options, lengths=order[:, place], on_step=shown)
        _keep(best, found, rows, _cosines(encoder, vocabulary, found.tokens, latents))
    return best


def _propose(
    best: _Best, random: np.random.Generator, candidates: int, *, share: float, max_tokens: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return each row's best text several times, with about this share of its tokens masked, rather the doubtful ones; a
    third of them one token shorter or longer."""
    rows = np.repeat(np.arange(len(best.lengths)), candidates)
    tokens, lengths, scores = best.tokens[rows].copy(), best.lengths[rows].copy(), best.scores[rows]
    kind = random.integers(6, size=len(rows))
    for row in np.nonzero(kind < 2)[0]:
        place, size = int(random.integers(lengths[row])), int(lengths[row])
        if kind[row] == 0 and size < max_tokens:
            tokens[row, place + 1 : size + 1] = tokens[row, place:size].copy()
            tokens[row, place] = MASK
            lengths[row] += 1
        elif kind[row] == 1 and size > 1:
            tokens[row, place : size - 1] = tokens[row, place + 1 : size].copy()
            tokens[row, size - 1] = PAD
            lengths[row] -= 1
    real = np.arange(max_tokens) < lengths[:, None]
    chance = share * (1.5 - np.clip(scores, 0, 1))
    masked = (random.random(tokens.shape) < chance) & real
    masked[np.arange(len(rows)), random.integers(lengths)] = True  # at least one
    tokens[masked] = MASK
    return tokens, lengths, rows


def _cosines(
    encoder: Encoder, vocabulary: Vocabulary, tokens: NDArray[Any], latents: NDArray[Any]
) -> NDArray[np.float32]:
    texts: Sequence[str] = vocabulary.decode_batch(tokens)
    different = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    vectors = encoder.encode(list(different))[[different[text] for text in texts]]
    cosines: NDArray[np.float32] = (vectors * np.asarray(latents, np.float32)).sum(-1)
    return cosines


def _keep(best: _Best, found: Decoded, rows: NDArray[Any], cosines: NDArray[np.float32]) -> None:
    """Put candidates in the place of worse texts."""
    width = found.tokens.shape[1]
    order = np.argsort(cosines, kind="stable")  # the best of a row comes last and stays
    order = order[cosines[order] > best.cosine[rows[order]]]
    target = rows[order]
    best.tokens[target] = PAD
    best.tokens[target, :width] = found.tokens[order]
    best.scores[target, :width] = found.scores[order]
    best.lengths[target] = found.lengths[order]
    best.cosine[target] = cosines[order]
