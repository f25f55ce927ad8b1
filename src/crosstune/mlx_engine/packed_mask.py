"""Several documents in a row, each blind to the others: what mlx-lm's models take for a cache and ask for a mask."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


class DocumentMask:
    """The mask of packed rows. It keeps nothing: keys and values are those of the row itself.

    Positions run on through a row. Rotary positions count only from each other, so within a document nothing changes.
    """

    offset = 0

    def __init__(self, segments: mx.array) -> None:
        self.segments = segments
        self.masks: dict[int | None, mx.array] = {}

    def make_mask(
        self, num_tokens: int, return_array: bool = True, window_size: int | None = None
    ) -> mx.array:
        if window_size not in self.masks:
            place = mx.arange(num_tokens)
            seen = place[:, None] >= place[None]
            if window_size is not None:
                seen = seen & (place[:, None] < place[None] + window_size)
            same = self.segments[:, :, None] == self.segments[:, None, :]
            self.masks[window_size] = (same & seen)[:, None]
        return self.masks[window_size]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


def document_caches(model: Any, segments: mx.array) -> list[DocumentMask]:
    return [DocumentMask(segments)] * len(model.layers)
