"""Define tokenized examples and batches of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IGNORED = -100
"""The target of a position without loss."""

IntArray = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One tokenized document. `supervised[i]` is true when token i is to be predicted."""

    tokens: IntArray
    supervised: NDArray[np.bool_]
    index: int
    """The index of its row in the dataset."""


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Rows of equal length. Targets are shifted: position t predicts `targets[:, t]`."""

    input_ids: IntArray
    targets: IntArray
    segments: IntArray
    """0 for padding, otherwise the number of the document in its row, counted from 1."""
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
        """True if a row holds more than one document."""
        return bool(self.segments.max() > 1)

    @property
    def has_padding(self) -> bool:
        return bool((self.segments == 0).any())


def number_answers(batch: TokenBatch) -> NDArray[np.int64]:
    """Return for each supervised token, row by row, the number of its document among those with supervised tokens."""
    row, column = (batch.targets != IGNORED).nonzero()
    segment = batch.segments[row, column]
    begins = (np.diff(row, prepend=-1) != 0) | (np.diff(segment, prepend=-1) != 0)
    return begins.cumsum(dtype=np.int64) - 1


def without_padding(batch: TokenBatch) -> TokenBatch:
    """Return all documents of a batch in one row, in the same order. The targets stay those within each document."""
    real = batch.segments > 0
    starts = np.ones_like(real)
    starts[:, 1:] = batch.segments[:, 1:] != batch.segments[:, :-1]
    return TokenBatch(
        input_ids=batch.input_ids[real][None],
        targets=batch.targets[real][None],
        segments=starts[real].cumsum(dtype=np.int32)[None],
        positions=batch.positions[real][None],
    )
