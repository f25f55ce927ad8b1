"""Mask packed rows so that documents do not attend to each other, through mlx-lm's cache interface."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


class DocumentMask:
    """A cache that stores nothing and only provides the mask of packed rows.

    Positions continue through a row. Rotary embeddings depend only on relative positions, so documents are unaffected.
    """

    offset = 0

    def __init__(self, segments: mx.array) -> None:
        self.segments = segments
        self.masks: dict[int | None, mx.array] = {}

    def make_mask(
        self, num_tokens: int, return_array: bool = True, window_size: int | None = None
    ) -> mx.array:
        if window_size not in self.masks:
            position = mx.arange(num_tokens)
            visible = position[:, None] >= position[None]
            if window_size is not None:
                visible = visible & (position[:, None] < position[None] + window_size)
            same_document = self.segments[:, :, None] == self.segments[:, None, :]
            self.masks[window_size] = (same_document & visible)[:, None]
        return self.masks[window_size]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


def document_caches(model: Any, segments: mx.array) -> list[DocumentMask]:
    return [DocumentMask(segments)] * len(model.layers)
