"""Draw the modes, times, masks and noise of a step, from the seed and the step alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from crosstune.config.options.latent import MODES

T_MIN = 1e-3
"""Times are drawn from T_MIN to 1 - T_MIN."""
L2T, T2L, JOINT = range(len(MODES))


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The random draws for the rows of a step."""

    mode: NDArray[np.int8]
    """Index into MODES."""
    text_time: NDArray[np.float32]
    """Share of masked tokens: 0 for clean text, 1 for fully masked text."""
    latent_time: NDArray[np.float32]
    """0 for the clean vector, 1 for noise alone."""
    masked: NDArray[np.bool_]
    """(rows, max_tokens): masked tokens, never padding."""
    noise: NDArray[np.float32]
    """Zero if no vector gets noise: every row has mode l2t, and there is no `latent_noise`."""
    latent_noise: float
    without_latent: NDArray[np.bool_]
    """Rows whose latent is replaced by the null latent, for classifier-free guidance."""

    def predicts_text(self) -> NDArray[np.bool_]:
        return self.mode != T2L

    def predicts_latent(self) -> NDArray[np.bool_]:
        return self.mode != L2T


def draw(
    lengths: NDArray[np.int32],
    *,
    max_tokens: int,
    dim: int,
    shares: Mapping[str, float],
    dropped: float,
    key: tuple[int, ...],
    latent_noise: float = 0.0,
) -> Drawn:
    """Draw for rows of these lengths. `key` is the seed and the step; `latent_noise` is the standard deviation of the
    noise in the vectors of mode l2t."""
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
    text_time[without & (mode == T2L)] = 1.0  # fully masked text tells only its length
    real = np.arange(max_tokens) < lengths[:, None]
    masked = (random.random((rows, max_tokens), dtype=np.float32) < text_time[:, None]) & real
    # Drawn last and only if needed: it dominates the preparation of a step.
    if latent_noise or (mode != L2T).any():
        noise = random.standard_normal((rows, dim), dtype=np.float32)
    else:
        noise = np.broadcast_to(np.float32(0.0), (rows, dim))
    return Drawn(
        mode=mode,
        text_time=text_time,
        latent_time=latent_time,
        masked=masked,
        noise=noise,
        latent_noise=latent_noise,
        without_latent=without_latent,
    )


def _spread(random: np.random.Generator, rows: int) -> NDArray[np.float32]:
    """Return times spread evenly over the rows, in random order: a step has all noise levels."""
    times = (random.random() + np.arange(rows) / max(1, rows)) % 1.0
    spread: NDArray[np.float32] = (T_MIN + (1 - 2 * T_MIN) * random.permutation(times)).astype(np.float32)
    return spread


def alpha_sigma(time: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the factors of the clean vector and of the noise at a time: alpha^2 + sigma^2 = 1."""
    angle = 0.5 * np.pi * time
    return np.cos(angle), np.sin(angle)
