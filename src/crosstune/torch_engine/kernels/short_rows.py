"""Attention within short rows on a CPU by batched matmul, with a hand-written backward pass.

torch's fused CPU attention multiplies small blocks of one head at a time; its backward pass is slow for short rows. Here one
call multiplies a block of queries of all heads. Queries that share keys are stacked as rows of one matrix, so no key is copied;
a block skips the keys after its last query.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from crosstune.estimate.fast_layers import QUERIES_AT_A_TIME


def attend_short_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    window: int | None,
    scale: float,
    keep: bool,
) -> torch.Tensor:
    """Return causal attention over queries, keys and values of rows x length x heads x size, in that layout.

    `mask` (rows or 1 x 1 x length x length): visible keys of each query, in addition to causality; `window`: the farthest key.
    Every query must see at least its own key. `keep` saves the probabilities for the backward pass; otherwise they are recomputed.
    """
    found: torch.Tensor = _ShortRows.apply(q, k, v, mask, window, scale, keep)
    return found


class _ShortRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        window: int | None,
        scale: float,
        keep: bool,
    ) -> torch.Tensor:
        num_keys, shared = k.shape[2], q.shape[2] // k.shape[2]
        queries, keys, values = _fold(q, num_keys, scale), _columns(k), _fold(v, num_keys)
        out = torch.empty_like(queries)
        kept = []
        for tokens, rows, seen in _blocks(q.shape[1], shared, window):
            probs = _probabilities(queries[:, rows], keys[..., seen], tokens, seen, mask)
            torch.bmm(probs, values[:, seen], out=out[:, rows])
            if keep and any(ctx.needs_input_grad):
                kept.append(probs)
        ctx.mask, ctx.window, ctx.scale = mask, window, scale
        ctx.save_for_backward(q, k, v, *kept)
        return _unfold(out, q.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, *kept = ctx.saved_tensors
        num_keys, shared = k.shape[2], q.shape[2] // k.shape[2]
        queries, keys, values = _fold(q, num_keys, ctx.scale), _fold(k, num_keys), _columns(v)
        upstream, key_columns = _fold(gradients[0], num_keys), None if kept else _columns(k)
        dq = torch.empty_like(queries)
        # Sum the blocks in fp32 or wider.
        wide = torch.promote_types(k.dtype, torch.float32)
        dk, dv = (torch.zeros_like(keys, dtype=wide) for _ in range(2))
        for index, (tokens, rows, seen) in enumerate(_blocks(q.shape[1], shared, ctx.window)):
            if key_columns is None:
                probs = kept[index]
            else:
                probs = _probabilities(queries[:, rows], key_columns[..., seen], tokens, seen, ctx.mask)
            dv[:, seen] += torch.bmm(probs.transpose(1, 2), upstream[:, rows])
            found = torch.bmm(upstream[:, rows], values[..., seen])
            scores = torch._softmax_backward_data(found, probs, -1, probs.dtype)
            torch.bmm(scores, keys[:, seen], out=dq[:, rows])
            dk[:, seen] += torch.bmm(scores.transpose(1, 2), queries[:, rows])
        parts = ((dq.mul_(ctx.scale), q), (dk, k), (dv, v))
        return *(_unfold(part, like.shape).to(like.dtype) for part, like in parts), None, None, None, None


def _blocks(length: int, shared: int, window: int | None) -> Iterator[tuple[slice, slice, slice]]:
    """Yield blocks of tokens, with their rows of `shared` stacked queries and their visible keys."""
    for start in range(0, length, QUERIES_AT_A_TIME):
        stop = min(start + QUERIES_AT_A_TIME, length)
        first_key = 0 if window is None else max(0, start - window + 1)
        yield slice(start, stop), slice(start * shared, stop * shared), slice(first_key, stop)


def _probabilities(
    queries: torch.Tensor, keys: torch.Tensor, tokens: slice, seen: slice, mask: torch.Tensor | None
) -> torch.Tensor:
    """Return the softmax of a block's scores for keys in columns. torch computes it in fp32 for 16-bit numbers."""
    scores = torch.bmm(queries, keys)
    count = tokens.stop - tokens.start
    by_query = scores.view(len(scores), count, -1, scores.shape[-1])
    if mask is None:  # only the last keys can follow a query
        after = torch.ones(count, count, dtype=torch.bool, device=keys.device).triu_(1)
        by_query[..., -count:].masked_fill_(after[:, None], -torch.inf)
    else:
        hidden = ~mask[:, 0, tokens, seen]
        by_row = by_query.unflatten(0, (-1, len(scores) // len(mask))) if len(mask) > 1 else by_query[None]
        by_row.masked_fill_(hidden[:, None, :, None], -torch.inf)
    return torch.softmax(scores, dim=-1)


def _fold(values: torch.Tensor, num_keys: int, scale: float | None = None) -> torch.Tensor:
    """Return rows x length x heads x size as one matrix for each row and key head, with the queries of its heads stacked."""
    rows, _, heads, size = values.shape
    by_key = values.unflatten(2, (num_keys, heads // num_keys)).transpose(1, 2)
    folded = torch.empty(by_key.shape, dtype=values.dtype, device=values.device)
    if scale is None:
        folded.copy_(by_key)
    else:
        torch.mul(by_key, scale, out=folded)
    return folded.view(rows * num_keys, -1, size)


def _columns(values: torch.Tensor) -> torch.Tensor:
    """Return rows x length x heads x size as a matrix of columns for each row and head: a matmul with some of the columns needs
    half the time of one with transposed rows."""
    return values.permute(0, 2, 3, 1).flatten(0, 1).contiguous()


def _unfold(folded: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    rows, length, _, size = shape
    return folded.view(rows, len(folded) // rows, length, -1, size).transpose(1, 2).reshape(shape)
