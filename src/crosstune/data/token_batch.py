"""Tokenized examples and rectangular batches of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IGNORED = -100
"""The target of a position that carries no loss."""

IntArray = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One tokenized document. `supervised[i]` says whether token i is to be predicted."""

    tokens: IntArray
    supervised: NDArray[np.bool_]
    index: int
    """Its place in the data set, counted from 0."""


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Rows of equal length. Targets are already shifted: position t predicts `targets[:, t]`."""

    input_ids: IntArray
    targets: IntArray
    segments: IntArray
    """0 where there is padding, else the number of the document within its row, from 1."""
    positions: IntArray

    @property
    def num_tokens(self) -> int:
        return int((self.segments > 0).sum())

    @property
    def weight(self) -> int:
        """The number of supervised tokens."""
        return int((self.targets != IGNORED).sum())

    @property
    def is_packed(self) -> bool:
        """Whether a row holds more than one document."""
        return bool(self.segments.max() > 1)
