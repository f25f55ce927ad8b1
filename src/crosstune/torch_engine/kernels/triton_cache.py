"""Triton kernels for attention of one new token per row over a cache of rows x columns x heads x size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 64
"""Columns read at a time."""
_PROGRAMS = 512
"""Programs that fill a GPU: with fewer rows and heads, several programs share the columns of each."""


@triton.jit
def _store(k, v, keys, values, positions, k_row, v_row, cache_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    target = row.to(tl.int64) * cache_row + tl.load(positions + row) * WIDTH + columns
    tl.store(keys + target, tl.load(k + row * k_row + columns, mask=inside), mask=inside)
    tl.store(values + target, tl.load(v + row * v_row + columns, mask=inside), mask=inside)


@triton.jit
def _attend(
    q,
    keys,
    values,
    positions,
    out,
    parts,
    stats,
    scale,
    window,
    q_row,
    cache_row,
    cache_column,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    WIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend from the `QUERIES` queries of a key's head. With several splits, a program writes the sum of its columns, and the
    largest score and the sum of the weights of each query."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    stop = tl.load(positions + row) + 1
    start = tl.maximum(stop - window, 0)
    share = tl.cdiv(tl.cdiv(stop - start, SPLITS), BLOCK) * BLOCK
    first = start + split * share
    last = tl.minimum(first + share, stop)
    dims, group = tl.arange(0, WIDE), tl.arange(0, GROUP)
    inside = dims < SIZE
    places = (head * QUERIES + group)[:, None] * SIZE + dims[None, :]
    real = (group < QUERIES)[:, None] & inside[None, :]
    queries = tl.load(q + row * q_row + places, mask=real, other=0.0)
    largest = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    added = tl.zeros([GROUP, WIDE], tl.float32)
    base = row.to(tl.int64) * cache_row + head * SIZE
    for begin in range(first, last, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        seen = columns < last
        cells = base + columns.to(tl.int64)[:, None] * cache_column + dims[None, :]
        mask = seen[:, None] & inside[None, :]
        key = tl.load(keys + cells, mask=mask, other=0.0)
        scores = tl.dot(queries, tl.trans(key), input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        highest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - highest[:, None])
        shrink = tl.exp(largest - highest)
        value = tl.load(values + cells, mask=mask, other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        added = added * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        largest = highest
    num_heads = tl.num_programs(1) * QUERIES
    if SPLITS == 1:
        tl.store(
            out + row.to(tl.int64) * num_heads * SIZE + places,
            (added / total[:, None]).to(out.dtype.element_ty),
            mask=real,
        )
    else:
        lines = ((row * num_heads + head * QUERIES + group) * SPLITS + split).to(tl.int64)
        tl.store(parts + lines[:, None] * SIZE + dims[None, :], added, mask=real)
        tl.store(stats + lines * 2, largest, mask=group < QUERIES)
        tl.store(stats + lines * 2 + 1, total, mask=group < QUERIES)


@triton.jit
def _merge(parts, stats, out, SIZE: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, WIDE)
    inside = dims < SIZE
    largest = tl.load(stats + (line * SPLITS + splits) * 2)
    total = tl.load(stats + (line * SPLITS + splits) * 2 + 1)
    shrink = tl.exp(largest - tl.max(largest, 0))
    cells = (line * SPLITS + splits)[:, None] * SIZE + dims[None, :]
    added = tl.load(parts + cells, mask=inside[None, :], other=0.0)
    found = tl.sum(added * shrink[:, None], 0) / tl.sum(total * shrink, 0)
    tl.store(out + line * SIZE + dims, found.to(out.dtype.element_ty), mask=inside)


def store(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor
) -> None:
    """Write the keys and values of one token per row, rows x heads x size, at its position."""
    width = k.shape[1] * k.shape[2]
    block = triton.next_power_of_2(width)
    strides = (k.stride(0), v.stride(0), keys.stride(0))
    _store[(len(k),)](k, v, keys, values, positions, *strides, WIDTH=width, BLOCK=block)


def attend_cached(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    *,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Return the attention of queries, rows x heads x size, over the columns up to the position of each row."""
    num_rows, num_queries, size = q.shape
    num_keys = keys.shape[2]
    fewest = triton.next_power_of_2(triton.cdiv(_PROGRAMS, num_rows * num_keys))
    wide = max(16, triton.next_power_of_2(size))
    block = _BLOCK if wide <= 128 else _BLOCK // 2  # for the shared memory of smaller GPUs
    splits = min(32, fewest, triton.next_power_of_2(triton.cdiv(keys.shape[1], block)))
    out = torch.empty(num_rows, num_queries, size, dtype=q.dtype, device=q.device)
    lines = num_rows * num_queries * splits if splits > 1 else 0
    parts = torch.empty(lines, size, dtype=torch.float32, device=q.device)
    stats = torch.empty(lines, 2, dtype=torch.float32, device=q.device)
    queries = num_queries // num_keys
    _attend[(num_rows, num_keys, splits)](
        q,
        keys,
        values,
        positions,
        out,
        parts,
        stats,
        scale,
        keys.shape[1] if window is None else window,
        q.stride(0),
        keys.stride(0),
        keys.stride(1),
        QUERIES=queries,
        SIZE=size,
        GROUP=max(16, triton.next_power_of_2(queries)),
        WIDE=wide,
        SPLITS=splits,
        BLOCK=block,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=2,
    )
    if splits > 1:
        _merge[(num_rows * num_queries,)](parts, stats, out, SIZE=size, WIDE=wide, SPLITS=splits)
    return out
