"""Define what decoding takes and gives, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

OnStep = Callable[[int, int, NDArray[Any]], None]
"""Called with the step, the number of steps, and the tokens as they are then."""


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    steps: int = 8
    temperature: float = 0.0
    """0 for the likeliest token."""
    guidance: float = 1.0
    num_lengths: int = 1
    """How many of the likeliest lengths are decoded; the model's own confidence chooses among them."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Decoded:
    tokens: NDArray[Any]
    """(rows, longest), padded with 0."""
    lengths: NDArray[Any]
    scores: NDArray[Any]
    """The probability of each token when it was chosen."""


class Samples(Protocol):
    """What an engine's sampler can do."""

    def length_scores(self, latents: NDArray[Any]) -> NDArray[np.float32]: ...

    def decode(
        self,
        latents: NDArray[Any],
        *,
        options: DecodeOptions,
        lengths: NDArray[Any] | None = None,
        on_step: OnStep | None = None,
    ) -> Decoded: ...

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
