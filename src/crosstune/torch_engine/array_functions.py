"""Functions of torch under the names that losses of both engines call; reductions are over the last axis."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

exp, absolute, minimum, logaddexp = torch.exp, torch.abs, torch.minimum, torch.logaddexp
clip, detach, relu, log_sigmoid = torch.clamp, torch.Tensor.detach, torch.relu, functional.logsigmoid
log_softmax, logsumexp = partial(torch.log_softmax, dim=-1), partial(torch.logsumexp, dim=-1)
argmax, concat, stack = (
    partial(torch.argmax, dim=-1),
    partial(torch.cat, dim=-1),
    partial(torch.stack, dim=-1),
)
as_ids = torch.Tensor.long


def log1mexp(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(x)) for negative x."""
    return torch.log(-torch.expm1(x))


def sum_by(values: torch.Tensor, numbers: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the sum of the values with each number, in an array shaped like `like`."""
    return torch.zeros_like(like, dtype=values.dtype).index_add(0, numbers, values)


def top_ids(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the largest values, the largest first."""
    return x.topk(count, dim=-1).indices


def gather(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return x.gather(-1, ids)


def without(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return `x` with -inf at these indices."""
    return x.scatter(-1, ids, -torch.inf)
