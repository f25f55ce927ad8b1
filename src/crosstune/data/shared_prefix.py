"""Arrange rows that begin alike as one row, in which the common tokens stand once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from crosstune.data.token_batch import IGNORED, IntArray, TokenBatch

MOST_TOKENS = 512
"""Every token is compared with all others of the row: beyond this length, that costs what the common tokens save."""
LARGEST_SHARE = 0.8
"""The largest share of the tokens with padding that may be left for sharing to be worth it."""


@dataclass(frozen=True, kw_only=True)
class SharedRow:
    """The tokens of a batch in one row: the common ones, then the rest of each row."""

    tokens: IntArray
    positions: IntArray
    targets: IntArray
    """Shifted, as in a batch. Supervised ones come in the order of the batch."""
    seen: NDArray[np.bool_]
    """Which tokens (columns) each token (row) attends to: the common ones and those of its own row, up to itself."""


def share_prefix(batch: TokenBatch) -> SharedRow | None:
    """Return the rows of a batch as one row, without padding; None if too few tokens are common to all of them. A token
    with a target is not common, since the rows go on differently."""
    count, width = batch.input_ids.shape
    if count == 1 or batch.is_packed or not batch.weight:
        return None
    lengths = (batch.segments > 0).sum(axis=1)
    common = _count_common(batch, shortest=int(lengths.min()))
    total = int(lengths.sum()) - (count - 1) * common
    if not common or total > min(MOST_TOKENS, LARGEST_SHARE * count * width):
        return None
    own = np.arange(width)[None] >= common
    own = own & (batch.segments > 0)
    rows = np.concatenate([np.zeros(common, dtype=np.int64), 1 + own.nonzero()[0]])
    positions = np.concatenate([np.arange(common, dtype=np.int32), batch.positions[own]])
    same = (rows[:, None] == rows[None, :]) | (rows[None, :] == 0)
    return SharedRow(
        tokens=np.concatenate([batch.input_ids[0, :common], batch.input_ids[own]]),
        positions=positions,
        targets=np.concatenate([batch.targets[0, :common], batch.targets[own]]),
        seen=same & np.tri(total, dtype=np.bool_),
    )


def _count_common(batch: TokenBatch, *, shortest: int) -> int:
    """Return with how many equal tokens without targets all rows begin."""
    alike = (batch.input_ids == batch.input_ids[:1]).all(axis=0) & (batch.targets == IGNORED).all(axis=0)
    alike = alike[: shortest - 1]
    return len(alike) if alike.all() else int(alike.argmin())
