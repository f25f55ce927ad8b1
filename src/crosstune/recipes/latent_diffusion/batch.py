"""Draw the noise of a step, and make its micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.config.options.latent import MODES
from crosstune.recipes.latent_diffusion.pair_folder import Pairs

T_MIN = 1e-3
"""Times are drawn from T_MIN to 1 - T_MIN."""
L2T, T2L, JOINT = range(len(MODES))
LENGTH_WEIGHT = 0.1
"""Weight of the cross entropy of the text's length."""


@dataclass(frozen=True, kw_only=True)
class NoiseDraws:
    """The random draws for the rows of a step."""

    mode: NDArray[np.int8]
    """Index into MODES."""
    text_time: NDArray[np.float32]
    """Expected fraction of masked tokens: 0 for clean text, 1 for fully masked text."""
    latent_time: NDArray[np.float32]
    """0 for the clean vector, 1 for pure noise."""
    masked: NDArray[np.bool_]
    """(rows, max_tokens): masked tokens, never padding."""
    noise: NDArray[np.float32]
    """Zero if every row has mode l2t and there is no `latent_noise`."""
    latent_noise: float
    without_latent: NDArray[np.bool_]
    """Rows whose latent is replaced by the null latent, for classifier-free guidance."""


def draw(
    lengths: NDArray[np.int32],
    *,
    max_tokens: int,
    dim: int,
    shares: Mapping[str, float],
    dropped: float = 0.0,
    key: tuple[int, ...],
    latent_noise: float = 0.0,
) -> NoiseDraws:
    """Draw modes, times, masks and noise for rows of these lengths.

    `key` is the seed and the step; `latent_noise` is the standard deviation of the noise in the vectors of mode l2t.
    """
    random = np.random.default_rng(list(key))
    rows = len(lengths)
    weights = np.array([shares.get(mode, 0.0) for mode in MODES])
    mode = random.choice(len(MODES), size=rows, p=weights / weights.sum()).astype(np.int8)
    text_time, latent_time = _spread(random, rows), _spread(random, rows)
    text_time[mode == T2L] = 0.0
    latent_time[mode == L2T] = 0.0
    without = random.random(rows) < dropped
    without_latent = without & (mode == L2T)
    latent_time[without_latent] = 1.0
    text_time[without & (mode == T2L)] = 1.0  # fully masked: only its length is known
    real = np.arange(max_tokens) < lengths[:, None]
    masked = (random.random((rows, max_tokens), dtype=np.float32) < text_time[:, None]) & real
    # Drawn last and only if needed, since this is most of the work.
    if latent_noise or (mode != L2T).any():
        noise = random.standard_normal((rows, dim), dtype=np.float32)
    else:
        noise = np.broadcast_to(np.float32(0.0), (rows, dim))
    return NoiseDraws(
        mode=mode,
        text_time=text_time,
        latent_time=latent_time,
        masked=masked,
        noise=noise,
        latent_noise=latent_noise,
        without_latent=without_latent,
    )


def _spread(random: np.random.Generator, rows: int) -> NDArray[np.float32]:
    """Return evenly spaced times in random order, so that a step covers all noise levels."""
    times = (random.random() + np.arange(rows) / max(1, rows)) % 1.0
    return (T_MIN + (1 - 2 * T_MIN) * random.permutation(times)).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class PairBatch(NoiseDraws):
    """Rows of a step with their noise. The factors turn sums over rows into weighted means over the whole step, across micro-batches."""

    tokens: NDArray[np.int64]
    lengths: NDArray[np.int64]
    latents: NDArray[np.float32]
    """Scaled to unit variance."""
    noisy: NDArray[np.float32]
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
        """Return the arrays that the task reads."""
        return {name: values for name, values in vars(self).items() if name not in ("mode", "latent_noise")}


def make_batch(
    pairs: Pairs,
    rows: NDArray[np.int64],
    drawn: NoiseDraws,
    *,
    text_weight: float = 1.0,
    latent_weight: float = 0.1,
) -> PairBatch:
    """Return all rows of a step as one batch."""
    lengths = np.asarray(pairs.lengths[rows], np.int64)
    dim = pairs.latents.shape[1]
    latents = np.asarray(pairs.latents[rows], np.float32) * np.float32(dim**0.5)
    count = len(rows)
    text, latent = drawn.mode != T2L, drawn.mode != L2T
    num_masked = int(drawn.masked[text].sum())
    return PairBatch(
        **vars(drawn),
        tokens=np.asarray(pairs.tokens[rows], np.int64),
        lengths=lengths,
        latents=latents,
        noisy=_noisy(latents, drawn),
        text_factor=_factor(text, text_weight * count, num_masked),
        latent_factor=_factor(latent, latent_weight * count, int(latent.sum())),
        length_factor=_factor(text, text_weight * LENGTH_WEIGHT * count, int(text.sum())),
    )


def divide_batch(batch: PairBatch, *, size: int) -> Iterator[PairBatch]:
    for start in range(0, batch.weight, size):
        part = slice(start, start + size)
        parts: dict[str, Any] = {name: array[part] for name, array in batch.arrays().items()}
        yield replace(batch, mode=batch.mode[part], **parts)


def _noisy(latents: NDArray[np.float32], drawn: NoiseDraws) -> NDArray[np.float32]:
    """Return alpha times the vectors plus sigma times the noise, with alpha^2 + sigma^2 = 1 at the drawn times."""
    predicted = drawn.mode != L2T
    if not predicted.any() and not drawn.latent_noise:
        return latents
    angle = 0.5 * np.pi * drawn.latent_time
    alpha, sigma = np.cos(angle), np.sin(angle)
    if drawn.latent_noise:
        sigma = np.where(predicted, sigma, np.float32(drawn.latent_noise))
    noisy: NDArray[np.float32] = alpha[:, None] * latents + sigma[:, None] * drawn.noise
    return noisy.astype(np.float32)


def _factor(counts: NDArray[np.bool_], total: float, over: int) -> NDArray[np.float32]:
    return counts.astype(np.float32) * np.float32(total / over if over else 0.0)
