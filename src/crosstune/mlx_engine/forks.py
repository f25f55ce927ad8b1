"""Compute answers that share a prompt with MLX: the prompts in one pass, then the answers with the prompts' keys and values.

Models of mlx-lm rotate keys by the offset of their cache, so tokens of one row cannot have positions that restart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from crosstune.mlx_engine.split_head import TRIAL_ERRORS

_TOLERANCE = 1e-3


class _Prompts:
    """A cache of one layer that keeps the keys and values of a pass over prompts, padded on the left."""

    offset = 0

    def __init__(self, lengths: mx.array) -> None:
        self.lengths = lengths
        self.states: tuple[mx.array, mx.array] | None = None

    def make_mask(
        self, num_tokens: int, return_array: bool = True, window_size: int | None = None
    ) -> mx.array:
        place = mx.arange(num_tokens)
        seen = _causal(place, place, window_size)[None] & self.is_real(num_tokens)[:, None, :]
        return (seen | mx.eye(num_tokens, dtype=mx.bool_)[None])[:, None]  # padding attends to itself

    def is_real(self, num_tokens: int) -> mx.array:
        return mx.arange(num_tokens)[None] >= num_tokens - self.lengths[:, None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.states = keys, values
        return keys, values


class _Branches:
    """A cache of one layer that puts the keys and values of its prompt before each answer."""

    def __init__(self, prompts: _Prompts, fork_of: mx.array) -> None:
        assert prompts.states is not None, "the model used its cache"
        self.prompts, self.fork_of = prompts, fork_of
        self.offset = prompts.states[0].shape[-2]

    def make_mask(
        self, num_tokens: int, return_array: bool = True, window_size: int | None = None
    ) -> mx.array:
        queries, keys = self.offset + mx.arange(num_tokens), mx.arange(self.offset + num_tokens)
        real = self.prompts.is_real(self.offset)[self.fork_of]
        real = mx.concatenate([real, mx.ones((len(self.fork_of), num_tokens), dtype=mx.bool_)], axis=1)
        return (_causal(queries, keys, window_size)[None] & real[:, None, :])[:, None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        assert self.prompts.states is not None
        before = [array[self.fork_of] for array in self.prompts.states]
        return (
            mx.concatenate([before[0], keys], axis=-2),
            mx.concatenate([before[1], values], axis=-2),
        )


def _causal(queries: mx.array, keys: mx.array, window: int | None) -> mx.array:
    behind = queries[:, None] - keys[None]
    return (behind >= 0) if window is None else (behind >= 0) & (behind < window)


def run_branches(
    run: Callable[..., mx.array],
    model: Any,
    *,
    prompts: mx.array,
    prompt_lengths: mx.array,
    branches: mx.array,
    fork_of: mx.array,
) -> mx.array:
    """Return `run` (a function of token ids and `cache`) of the branches, after their prompts."""
    caches = [_Prompts(prompt_lengths) for _ in model.layers]
    run(prompts, cache=caches)
    return run(branches, cache=[_Branches(cache, fork_of) for cache in caches])


def can_share_prompts(model: Any) -> bool:
    """Return True if a trial of answers after a shared prompt gives the logits of whole rows."""
    prompts = mx.array([[0, 0, 3, 5, 7], [2, 4, 6, 8, 9]])
    lengths, fork_of = mx.array([3, 5]), mx.array([0, 0, 1])
    branches = mx.array([[11, 12, 13], [12, 14, 15], [11, 13, 16]])
    try:
        found = run_branches(
            model, model, prompts=prompts, prompt_lengths=lengths, branches=branches, fork_of=fork_of
        )
        for number, fork in enumerate([0, 0, 1]):
            own = prompts[fork : fork + 1, 5 - int(lengths[fork]) :]
            whole = mx.concatenate([own, branches[number : number + 1]], axis=1)
            expected = model(whole)[:, -3:].astype(mx.float32)
            difference = mx.abs(found[number].astype(mx.float32) - expected[0]).max()
            size = mx.abs(expected).max()
            narrow = found.dtype in (mx.float16, mx.bfloat16)
            if not bool(difference <= (0.1 if narrow else _TOLERANCE) * size):
                return False
    except (*TRIAL_ERRORS, AssertionError):
        return False
    return True
