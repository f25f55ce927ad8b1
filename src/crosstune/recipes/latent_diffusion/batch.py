"""Make the micro-batches of a step from pairs and their noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.recipes.latent_diffusion.noise import Drawn, alpha_sigma
from crosstune.recipes.latent_diffusion.pair_folder import Pairs

LENGTH_WEIGHT = 0.1
"""Weight of the cross entropy of the text's length."""


@dataclass(frozen=True, kw_only=True)
class PairBatch:
    """Rows of a step. The factors turn sums over rows into weighted means over the whole step, however it is divided."""

    tokens: NDArray[np.int64]
    lengths: NDArray[np.int64]
    latents: NDArray[np.float32]
    """Scaled to unit variance."""
    noisy: NDArray[np.float32]
    noise: NDArray[np.float32]
    masked: NDArray[np.bool_]
    text_time: NDArray[np.float32]
    latent_time: NDArray[np.float32]
    without_latent: NDArray[np.bool_]
    text_factor: NDArray[np.float32]
    """Per row: weight of the cross entropy of each of its masked tokens."""
    latent_factor: NDArray[np.float32]
    length_factor: NDArray[np.float32]

    @property
    def weight(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


def make_batch(
    pairs: Pairs,
    rows: NDArray[np.int64],
    drawn: Drawn,
    *,
    text_weight: float = 1.0,
    latent_weight: float = 0.1,
) -> PairBatch:
    """Return all rows of a step as one batch."""
    lengths = np.asarray(pairs.lengths[rows], np.int64)
    dim = pairs.latents.shape[1]
    latents = np.asarray(pairs.latents[rows], np.float32) * np.float32(dim**0.5)
    count = len(rows)
    text, latent = drawn.predicts_text(), drawn.predicts_latent()
    num_masked = int(drawn.masked[text].sum())
    return PairBatch(
        tokens=np.asarray(pairs.tokens[rows], np.int64),
        lengths=lengths,
        latents=latents,
        noisy=_noisy(latents, drawn),
        noise=drawn.noise,
        masked=drawn.masked,
        text_time=drawn.text_time,
        latent_time=drawn.latent_time,
        without_latent=drawn.without_latent,
        text_factor=_factor(text, text_weight * count, num_masked),
        latent_factor=_factor(latent, latent_weight * count, int(latent.sum())),
        length_factor=_factor(text, text_weight * LENGTH_WEIGHT * count, int(text.sum())),
    )


def divide_batch(batch: PairBatch, *, size: int) -> Iterator[PairBatch]:
    for start in range(0, batch.weight, size):
        part = slice(start, start + size)
        yield PairBatch(**{name: array[part] for name, array in batch.arrays().items()})


def _noisy(latents: NDArray[np.float32], drawn: Drawn) -> NDArray[np.float32]:
    if not drawn.predicts_latent().any() and not drawn.latent_noise:
        return latents
    alpha, sigma = alpha_sigma(drawn.latent_time)
    if drawn.latent_noise:
        sigma = np.where(drawn.predicts_latent(), sigma, np.float32(drawn.latent_noise))
    noisy: NDArray[np.float32] = alpha[:, None] * latents + sigma[:, None] * drawn.noise
    return noisy.astype(np.float32)


def _factor(counts: NDArray[np.bool_], total: float, over: int) -> NDArray[np.float32]:
    return counts.astype(np.float32) * np.float32(total / over if over else 0.0)
