"""Define the options and results of sampling, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from crosstune.recipes.latent_diffusion.vocabulary import PAD

OnStep = Callable[[int, int, NDArray[Any]], None]
"""Called with the step, the number of steps, and the tokens as they are then."""


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    steps: int = 8
    temperature: float = 0.0
    """0 for the likeliest token."""
    guidance: float = 1.0
    num_lengths: int = 1
    """The number of likely lengths that are decoded; the model's own confidence chooses among them."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Decoded:
    tokens: NDArray[Any]
    """(rows, longest), padded with 0."""
    lengths: NDArray[Any]
    scores: NDArray[Any]
    """The probability of each token when it was chosen."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """New texts and the vectors that were denoised with them."""

    tokens: NDArray[Any]
    lengths: NDArray[Any]
    vectors: NDArray[np.float32]
    """Of norm 1."""


class Samples(Protocol):
    """Sample with the weights of a model, in some engine."""

    def length_scores(self, latents: NDArray[Any]) -> NDArray[np.float32]: ...

    def decode(
        self,
        latents: NDArray[Any],
        *,
        options: DecodeOptions,
        lengths: NDArray[Any] | None = None,
        on_step: OnStep | None = None,
    ) -> Decoded: ...

    def nats_per_token(
        self, tokens: NDArray[Any], lengths: NDArray[Any], latents: NDArray[Any], *, seed: int = 0
    ) -> float: ...

    def fill(
        self,
        tokens: NDArray[Any],
        lengths: NDArray[Any],
        latents: NDArray[Any],
        *,
        options: DecodeOptions,
        on_step: OnStep | None = None,
    ) -> Decoded: ...

    def encode(
        self,
        tokens: NDArray[Any],
        lengths: NDArray[Any],
        *,
        steps: int = 10,
        guidance: float = 1.0,
        seed: int = 0,
    ) -> NDArray[np.float32]: ...

    def generate(self, count: int, *, options: DecodeOptions, on_step: OnStep | None = None) -> Generated: ...


def surer(one: Decoded, other: Decoded) -> Decoded:
    """Return for each row the text whose tokens have the higher mean logarithm of their probability."""
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
