"""Define the options and results of sampling, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.recipes.latent_diffusion.vocabulary import PAD

OnStep = Callable[[int, int, NDArray[Any]], None]
"""Called with the step, the number of steps, and the tokens after it."""


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    steps: int = 8
    temperature: float = 0.0
    """0 for the most likely token."""
    guidance: float = 1.0
    num_lengths: int = 1
    """Number of likely lengths to decode; the model's confidence chooses among them."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Decoded:
    tokens: NDArray[Any]
    """(rows, longest), padded with 0."""
    lengths: NDArray[Any]
    scores: NDArray[Any]
    """Probability of each token when it was chosen."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """New texts and the vectors that were denoised with them."""

    tokens: NDArray[Any]
    lengths: NDArray[Any]
    vectors: NDArray[np.float32]
    """Of norm 1."""


def surer(one: Decoded, other: Decoded) -> Decoded:
    """Return for each row the text with the higher mean log probability of its tokens."""
    width = max(one.tokens.shape[1], other.tokens.shape[1])
    tokens, scores, sure = [], [], []
    for found in (one, other):
        missing = ((0, 0), (0, width - found.tokens.shape[1]))
        tokens.append(np.pad(found.tokens, missing, constant_values=PAD))
        scores.append(np.pad(found.scores, missing, constant_values=1.0))
        sure.append(np.log(np.maximum(scores[-1], 1e-9)).sum(1) / found.lengths)
    second = sure[1] > sure[0]
    return Decoded(
        tokens=np.where(second[:, None], tokens[1], tokens[0]),
        lengths=np.where(second, other.lengths, one.lengths),
        scores=np.where(second[:, None], scores[1], scores[0]),
    )
