"""Attend in fp32 on a CPU so that a token's result does not depend on padding, cached tokens and the prompts beside it.

The keys that a query sees are added up in order, and what it does not see follows as zeros, in a number of keys and queries
for which the kernel rounds alike. Which numbers these are is tried once for each size of head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812

STEP = 16
BLOCK = 512
"""Keys that torch's kernel takes at a time."""
HIDDEN = -1e30
"""A mask that adds less than this to a score hides its key."""
QUERIES = 256
"""Queries of one call, which then needs the keys up to its last query alone: the kernel skips none inside a block."""


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """Return the attention of each query over the keys that its mask shows; None where this way is not known to hold."""
    if enable_gqa and key.ndim == query.ndim == value.ndim == 4 and key.numel() and value.numel():
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (key, value))
    if mask is not None and mask.dtype != torch.bool:
        shown = mask == 0
        mask = shown if bool((shown | (mask < HIDDEN)).all()) else mask
    if not _is_usual(query, key, value, mask):
        return None
    widths = alike_widths(query.shape[-1], torch.get_num_threads())
    if not widths:
        return None
    # One layout, as in the trial: after cached tokens it would be another.
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    length, count = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(length, count, dtype=torch.bool)
        mask = mask.tril() if is_causal else mask
    seen = mask[None, None] if mask.ndim == 2 else mask
    width = width_of(count, widths)
    used = seen.any(dim=2)[:, 0]
    if not bool(used.all()):
        used = used.expand(len(query), -1)
        seen = seen.expand(len(query), -1, -1, -1)
        places = [row.nonzero()[:, 0] for row in used]
        key, value = (_gathered(tensor, places, width) for tensor in (key, value))
        seen = _gathered(seen.transpose(2, 3), places, width).transpose(2, 3)
    elif width > count:
        key, value = (F.pad(tensor, (0, 0, 0, width - count)) for tensor in (key, value))
    parts = []
    for start in range(0, length, QUERIES):
        rows = slice(start, start + QUERIES)
        parts.append(_attend(query[:, :, rows], key, value, seen[:, :, rows], widths=widths, scale=scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _is_usual(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Return whether torch's kernel for CPUs takes these, each head by one thread."""
    if query.device.type != "cpu" or query.ndim != 4 or query.shape[1] < 2 or not query.numel():
        return False
    if key.shape != value.shape or key.shape[:2] != query.shape[:2] or not key.numel():
        return False
    shape = (query.shape[2], key.shape[2])
    return mask is None or (
        mask.dtype == torch.bool
        and mask.shape[-2:] == shape
        and (mask.ndim == 2 or (mask.ndim == 4 and mask.shape[1] == 1 and mask.shape[0] in (1, len(query))))
    )


def _gathered(tensor: torch.Tensor, places: list[torch.Tensor], width: int) -> torch.Tensor:
    """Return the keys that are used, in order, and zeros after them."""
    found = tensor.new_zeros(*tensor.shape[:2], width, tensor.shape[3])
    for row, place in enumerate(places):
        found[row, :, : len(place)] = tensor[row].index_select(1, place)
    return found


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    *,
    widths: tuple[int, ...],
    scale: float | None,
) -> torch.Tensor:
    length = query.shape[2]
    columns = seen.flatten(0, 2).any(dim=0).nonzero()
    until = int(columns[-1]) + 1 if len(columns) else 1
    width = width_of(until, widths)
    missing = -length % STEP
    blank = ~seen.any(dim=3, keepdim=True)
    added = query.new_full((len(seen), 1, length + missing, width), -torch.inf)
    added[:, :, :length, :until].masked_fill_(seen[..., :until] | blank, 0.0)
    added[:, :, length:, 0] = 0.0
    filled = F.pad(query, (0, 0, 0, missing)) if missing else query
    found = F.scaled_dot_product_attention(
        filled, key[:, :, :width], value[:, :, :width], attn_mask=added, scale=scale
    )[:, :, :length]
    return found.masked_fill(blank, 0.0) if bool(blank.any()) else found


def width_of(count: int, widths: tuple[int, ...]) -> int:
    """Return the least number of keys, not below the count, that is whole blocks and one of the widths."""
    blocks, rest = divmod(count - 1, BLOCK)
    return blocks * BLOCK + next(width for width in widths if width > rest)


@functools.cache
def alike_widths(size: int, threads: int) -> tuple[int, ...]:
    """Return the numbers of keys, up to a block, for which the kernel rounds as for two whole blocks; none if queries differ.

    Each query of the trial sees another number of keys, and must give the same bits in all widths that hold them, alone in
    the first block or after one, and at any place among any number of queries.
    """
    return find_alike_widths(F.scaled_dot_product_attention, size)


def find_alike_widths(attend: Callable[..., torch.Tensor], size: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(0)
    most, rows = 2 * BLOCK, QUERIES // 2
    query, key, value = (torch.randn(1, 2, count, size, generator=generator) for count in (rows, most, most))
    seen = torch.arange(1, rows + 1) * (most // rows) - torch.arange(rows) % 8
    added = torch.zeros(rows, most).masked_fill_(torch.arange(most) >= seen[:, None], -torch.inf)
    wanted = attend(query, key, value, attn_mask=added)

    def is_alike(width: int) -> bool:
        held = int((seen <= width).sum())
        count = max(STEP, held // STEP * STEP)
        found = attend(
            query[:, :, held - count : held] if held >= count else query[:, :, :count],
            key[:, :, :width],
            value[:, :, :width],
            attn_mask=(added[held - count : held] if held >= count else added[:count])[:, :width],
        )
        start = max(0, held - count)
        return torch.equal(found[:, :, : held - start], wanted[:, :, start:held])

    for count in range(STEP, QUERIES + 1, STEP):
        places = torch.arange(count) % rows
        found = attend(query[:, :, places], key, value, attn_mask=added[places])
        if not torch.equal(found, wanted[:, :, places]):
            return ()
    widths = [width for width in range(STEP, BLOCK + 1, STEP) if is_alike(width) and is_alike(BLOCK + width)]
    return tuple(widths) if BLOCK in widths else ()
