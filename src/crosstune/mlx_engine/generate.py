"""Generate answers for a batch of prompts with mlx-lm's caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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

from crosstune.core.sampling import Sampling
from crosstune.mlx_engine.sampling import TokenChooser

OnToken = Callable[[int], None]


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    sampling: Sampling,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Return the new tokens for each prompt, without the prompt and the stop token.

    Sampling uses its seed and does not change the random state of the training.
    `on_token` is called with each new token of a single prompt.
    """
    answer = partial(
        _answer,
        model,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        sampling=sampling,
        on_token=on_token,
    )
    padding = _padding(prompts)
    caches = _batch_caches(model, padding)
    if caches is None or (any(padding) and not takes_padding(model)):
        return [answer([prompt], [0], make_prompt_cache(model))[0] for prompt in prompts]
    return answer(prompts, padding, caches)


def _answer(
    model: Any,
    prompts: Sequence[Sequence[int]],
    padding: Sequence[int],
    caches: list[Any],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    sampling: Sampling,
    on_token: OnToken | None,
) -> list[list[int]]:
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


def _padding(prompts: Sequence[Sequence[int]]) -> list[int]:
    width = max(len(prompt) for prompt in prompts)
    return [width - len(prompt) for prompt in prompts]


def takes_padding(model: Any) -> bool:
    """Return whether left-padded rows give the same logits as alone. Tried once per model: not all models of mlx-lm
    respect the mask of each row."""
    if not hasattr(model, "takes_padding"):
        rows, padding = mx.arange(1, 41).reshape(5, 8), [0, 1, 2, 4, 5]
        try:
            together = model(rows, cache=_batch_caches(model, padding))[:, -1]
            alone = mx.concatenate(
                [model(rows[row : row + 1, pad:])[:, -1] for row, pad in enumerate(padding)]
            )
            limit = 0.05 * mx.abs(alone).max()
            model.takes_padding = bool(mx.abs(together - alone).max() <= limit)
        except (ValueError, TypeError, AttributeError, IndexError):
            model.takes_padding = False
    return bool(model.takes_padding)


def _batch_caches(model: Any, padding: list[int]) -> list[Any] | None:
    """Return mlx-lm's caches for left-padded rows, or None if the model uses another type of cache."""
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
