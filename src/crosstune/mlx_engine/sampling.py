"""Choose tokens from logits in MLX, as transformers does: penalty, temperature, top_k, top_p, min_p."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from crosstune.core.sampling import Sampling

_NEVER = float("-inf")


class TokenChooser:
    """Draw the next token of every row; `seen` marks the tokens that the repetition penalty applies to."""

    def __init__(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        self.prompts, self.sampling = prompts, sampling
        self.key = mx.random.key(sampling.seed)
        self.seen: mx.array | None = None

    def choose(self, logits: mx.array) -> mx.array:
        sampling = self.sampling
        if sampling.repetition_penalty != 1:
            if self.seen is None:
                self.seen = _occurring(self.prompts, logits.shape[-1])
            logits = penalize(logits, self.seen, sampling.repetition_penalty)
        self.key, drawn = mx.random.split(self.key)
        if sampling.temperature > 0:
            tokens = mx.random.categorical(filter_logits(logits / sampling.temperature, sampling), key=drawn)
        else:
            tokens = mx.argmax(logits, axis=-1)
        if self.seen is not None:
            self.seen[mx.arange(len(self.prompts)), tokens] = True
        return tokens


def penalize(logits: mx.array, seen: mx.array, penalty: float) -> mx.array:
    """Make the tokens marked in `seen` less likely."""
    return mx.where(seen, mx.where(logits < 0, logits * penalty, logits / penalty), logits)


def filter_logits(logits: mx.array, sampling: Sampling) -> mx.array:
    """Return the logits with those of the tokens that must not be drawn set to minus infinity."""
    if sampling.top_k:
        count = min(sampling.top_k, logits.shape[-1])
        least = mx.topk(logits, count, axis=-1).min(axis=-1, keepdims=True)
        logits = mx.where(logits < least, _NEVER, logits)
    if sampling.top_p < 1:
        order = mx.argsort(logits, axis=-1)
        ascending = mx.softmax(mx.take_along_axis(logits, order, axis=-1), axis=-1)
        dropped = mx.cumsum(ascending, axis=-1) <= 1 - sampling.top_p
        dropped[..., -1] = False
        logits = mx.where(mx.put_along_axis(mx.zeros_like(dropped), order, dropped, axis=-1), _NEVER, logits)
    if sampling.min_p > 0:
        shares = mx.softmax(logits, axis=-1)
        least = sampling.min_p * shares.max(axis=-1, keepdims=True)
        logits = mx.where(shares < least, _NEVER, logits)
    return logits


def _occurring(prompts: Sequence[Sequence[int]], vocabulary: int) -> mx.array:
    marks = np.zeros((len(prompts), vocabulary), dtype=np.bool_)
    for row, prompt in enumerate(prompts):
        marks[row, list(prompt)] = True
    return mx.array(marks)
