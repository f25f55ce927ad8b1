"""Functions of MLX under the names that losses of both engines call; reductions are over the last axis."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import mlx.nn as nn

exp, absolute, minimum, logaddexp = mx.exp, mx.abs, mx.minimum, mx.logaddexp
clip, detach, log_sigmoid = mx.clip, mx.stop_gradient, nn.log_sigmoid
log_softmax, logsumexp = partial(nn.log_softmax, axis=-1), partial(mx.logsumexp, axis=-1)
argmax, concat, stack = (
    partial(mx.argmax, axis=-1),
    partial(mx.concatenate, axis=-1),
    partial(mx.stack, axis=-1),
)
gather = partial(mx.take_along_axis, axis=-1)


def relu(x: mx.array) -> mx.array:
    return mx.maximum(x, 0)


def log1mexp(x: mx.array) -> mx.array:
    """Return log(1 - exp(x)) for negative x."""
    return mx.log(-mx.expm1(x))


def sum_by(values: mx.array, numbers: mx.array, like: mx.array) -> mx.array:
    """Return the sum of the values with each number, in an array shaped like `like`."""
    return mx.zeros(like.shape, dtype=values.dtype).at[numbers].add(values)


def top_ids(x: mx.array, count: int) -> mx.array:
    """Return the indices of the largest values, the largest first."""
    return mx.argsort(-x, axis=-1)[..., :count]


def without(x: mx.array, ids: mx.array) -> mx.array:
    """Return `x` with -inf at these indices."""
    return x + mx.put_along_axis(mx.zeros(x.shape), ids, mx.array(-mx.inf), axis=-1)


def as_ids(x: mx.array) -> mx.array:
    return x.astype(mx.int32)
