"""Generate answers for a batch of prompts with mlx-lm's caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from crosstune.core.sampling import GREEDY, Sampling

_NEVER = float("-inf")
OnToken = Callable[[int], None]


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    sampling: Sampling = GREEDY,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Return the new tokens for each prompt, without the prompt and the stop token.

    Sampling uses its own seed, so the random state of the run does not change. `on_token` is called with each new
    token of a single prompt.
    """
    padding = [max(map(len, prompts)) - len(prompt) for prompt in prompts]
    caches = _batch_caches(model, padding)
    if caches is None or (any(padding) and not supports_padding(model)):
        options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "stop_ids": stop_ids,
            "sampling": sampling,
        }
        return [generate(model, [prompt], **options, on_token=on_token)[0] for prompt in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts)))
    rows = [[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
    ids = mx.array(np.array(rows, dtype=np.int32))
    chooser = TokenChooser(prompts, sampling)
    for _ in range(max_new_tokens):
        tokens = chooser.choose(model(ids, cache=caches)[:, -1].astype(mx.float32))
        for row, token in enumerate(np.array(tokens).tolist()):
            if on_token is not None:
                on_token(token)
            if token in stop_ids:
                open_rows.discard(row)
            elif row in open_rows:
                answers[row].append(token)
        if not open_rows:
            break
        ids = tokens[:, None]
    return answers


def supports_padding(model: Any) -> bool:
    """True if left-padded rows have the same logits as single rows, tested once per model: some ignore a row's mask."""
    if not hasattr(model, "supports_padding"):
        rows, padding = mx.arange(1, 41).reshape(5, 8), [0, 1, 2, 4, 5]
        try:
            together = model(rows, cache=_batch_caches(model, padding))[:, -1]
            alone = mx.concatenate(
                [model(rows[row : row + 1, pad:])[:, -1] for row, pad in enumerate(padding)]
            )
            limit = 0.05 * mx.abs(alone).max()
            model.supports_padding = bool(mx.abs(together - alone).max() <= limit)
        except (ValueError, TypeError, AttributeError, IndexError):
            model.supports_padding = False
    return bool(model.supports_padding)


def _batch_caches(model: Any, padding: list[int]) -> list[Any] | None:
    """Return mlx-lm's caches for left-padded rows, or None if the model uses a different type of cache."""
    caches = make_prompt_cache(model)
    if not any(padding):
        return caches
    batched: list[Any] = []
    for cache in caches:
        if type(cache) is KVCache:
            batched.append(BatchKVCache(padding))
        elif type(cache) is RotatingKVCache:
            batched.append(BatchRotatingKVCache(cache.max_size, padding))
        else:
            return None
    return batched


class TokenChooser:
    """Choose the next token of every row. `seen` marks the tokens under the repetition penalty."""

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
    """Set the logits of excluded tokens to minus infinity."""
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
