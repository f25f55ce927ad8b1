"""The operations of fused blocks as Triton kernels: the functions of `torch_parts_plain`, for GPUs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from crosstune.recipes.latent_diffusion.torch_parts_plain import EPS, HEAD_EPS, HeadNorms, Segments

CHUNK = 16
"""Tokens of a row that one program sums."""
GELU_ROWS = 64
"""Rows of a feed-forward layer that one program sums."""


@triton.jit
def _modulate(
    x, branch, gate, shift, scale, total, out, mean, rstd, starts, stops, row_of, mod_stride, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < N
    line = tl.load(row_of + chunk).to(tl.int64) * mod_stride + column
    factor = 1.0 + tl.load(scale + line, mask=mask, other=0.0).to(tl.float32)
    added = tl.load(shift + line, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        opened = tl.load(gate + line, mask=mask, other=0.0).to(tl.float32)
    start = tl.load(starts + chunk)
    place = start.to(tl.int64) * N + column
    for token in range(start, tl.load(stops + chunk)):
        values = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        if ADD:
            values += opened * tl.load(branch + place, mask=mask, other=0.0).to(tl.float32)
            rounded = values.to(total.dtype.element_ty)
            tl.store(total + place, rounded, mask=mask)
            values = rounded.to(tl.float32)
        middle = tl.sum(values) / N
        values = tl.where(mask, values - middle, 0.0)
        inverse = 1.0 / tl.sqrt(tl.sum(values * values) / N + eps)
        tl.store(mean + token, middle)
        tl.store(rstd + token, inverse)
        found = values * inverse * factor + added
        tl.store(out + place, found.to(out.dtype.element_ty), mask=mask)
        place += N


@triton.jit
def _modulate_backward(
    gradient, total, mean, rstd, scale, residual, branch, gate, x_gradient, branch_gradient, sums,
    starts, stops, row_of, mod_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write the gradients of x and of the branch, and the sums of a chunk for shift, scale, gate and the branch's bias."""
    chunk = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < N
    line = tl.load(row_of + chunk).to(tl.int64) * mod_stride + column
    factor = 1.0 + tl.load(scale + line, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        opened = tl.load(gate + line, mask=mask, other=0.0).to(tl.float32)
    for_shift = tl.zeros([BLOCK], dtype=tl.float32)
    for_scale = tl.zeros([BLOCK], dtype=tl.float32)
    for_gate = tl.zeros([BLOCK], dtype=tl.float32)
    for_bias = tl.zeros([BLOCK], dtype=tl.float32)
    start = tl.load(starts + chunk)
    place = start.to(tl.int64) * N + column
    for token in range(start, tl.load(stops + chunk)):
        given = tl.load(gradient + place, mask=mask, other=0.0).to(tl.float32)
        values = tl.load(total + place, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.load(rstd + token)
        values = tl.where(mask, (values - tl.load(mean + token)) * inverse, 0.0)
        for_shift += given
        for_scale += given * values
        given *= factor
        found = (given - tl.sum(given) / N - values * (tl.sum(given * values) / N)) * inverse
        if RESIDUAL:
            found += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(x_gradient + place, found.to(x_gradient.dtype.element_ty), mask=mask)
        if ADD:
            for_gate += found * tl.load(branch + place, mask=mask, other=0.0).to(tl.float32)
            found *= opened
            for_bias += found
            tl.store(branch_gradient + place, found.to(branch_gradient.dtype.element_ty), mask=mask)
        place += N
    spot = sums + chunk.to(tl.int64) * 4 * N + column
    tl.store(spot, for_shift, mask=mask)
    tl.store(spot + N, for_scale, mask=mask)
    if ADD:
        tl.store(spot + 2 * N, for_gate, mask=mask)
        tl.store(spot + 3 * N, for_bias, mask=mask)


@triton.jit
def _sum_chunks(sums, out, row_chunks, N, BLOCK: tl.constexpr):
    """Add the sums of the chunks of a row."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    found = tl.zeros([BLOCK], dtype=tl.float32)
    first = tl.load(row_chunks + row)
    place = first.to(tl.int64) * N + column
    for _chunk in range(first, tl.load(row_chunks + row + 1)):
        found += tl.load(sums + place, mask=mask, other=0.0)
        place += N
    tl.store(out + row.to(tl.int64) * N + column, found, mask=mask)


@triton.jit
def _normalize_heads(
    qkv, q, k, is_latent, q_text, k_text, q_latent, k_latent, num_tokens, eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ALL: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.arange(0, ALL)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (head < HEADS) & (column < SIZE)
    width = HEADS * SIZE
    place = (tile * TILE).to(tl.int64) * width + head * SIZE + column
    source = (tile * TILE).to(tl.int64) * 3 * width + head * SIZE + column
    inside = column < SIZE
    q_gain = tl.load(q_text + column, mask=inside, other=0.0).to(tl.float32)
    k_gain = tl.load(k_text + column, mask=inside, other=0.0).to(tl.float32)
    q_latent_gain = tl.load(q_latent + column, mask=inside, other=0.0).to(tl.float32)
    k_latent_gain = tl.load(k_latent + column, mask=inside, other=0.0).to(tl.float32)
    for token in range(tile * TILE, tl.minimum(tile * TILE + TILE, num_tokens)):
        latent = tl.load(is_latent + token) != 0
        for part in tl.static_range(2):
            values = tl.load(qkv + source + part * width, mask=mask, other=0.0).to(tl.float32)
            inverse = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / SIZE + eps)
            if part == 0:
                gain = tl.where(latent, q_latent_gain, q_gain)
                target = q
            else:
                gain = tl.where(latent, k_latent_gain, k_gain)
                target = k
            found = values * inverse[:, None] * gain
            tl.store(target + place, found.to(q.dtype.element_ty), mask=mask)
        place += width
        source += 3 * width


@triton.jit
def _normalize_heads_backward(
    q_gradient, k_gradient, v_gradient, qkv, out, is_latent, q_text, k_text, q_latent, k_latent,
    weight_sums, bias_sums, q_stride, k_stride, v_stride, num_tokens, eps,
    HEADS: tl.constexpr, SIZE: tl.constexpr, ALL: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Write the gradient of queries (PART 0), keys (1) or values (2) of a tile of tokens, its sum over the text tokens,
    and the sums of the gradients of the norm's weights."""
    tile = tl.program_id(0)
    head = tl.arange(0, ALL)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (head < HEADS) & (column < SIZE)
    width = HEADS * SIZE
    place = head * SIZE + column
    start = (tile * TILE).to(tl.int64)
    line = start * 3 * width + PART * width + place
    inside = column < SIZE
    if PART == 0:
        source = q_gradient + start * q_stride + place
        text_gain = tl.load(q_text + column, mask=inside, other=0.0).to(tl.float32)
        latent_gain = tl.load(q_latent + column, mask=inside, other=0.0).to(tl.float32)
    elif PART == 1:
        source = k_gradient + start * k_stride + place
        text_gain = tl.load(k_text + column, mask=inside, other=0.0).to(tl.float32)
        latent_gain = tl.load(k_latent + column, mask=inside, other=0.0).to(tl.float32)
    else:
        source = v_gradient + start * v_stride + place
    for_bias = tl.zeros([ALL, BLOCK], dtype=tl.float32)
    for_text = tl.zeros([ALL, BLOCK], dtype=tl.float32)
    for_latent = tl.zeros([ALL, BLOCK], dtype=tl.float32)
    for token in range(tile * TILE, tl.minimum(tile * TILE + TILE, num_tokens)):
        latent = tl.load(is_latent + token) != 0
        given = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        if PART < 2:
            values = tl.load(qkv + line, mask=mask, other=0.0).to(tl.float32)
            inverse = (1.0 / tl.sqrt(tl.sum(values * values, axis=1) / SIZE + eps))[:, None]
            values *= inverse
            if latent:
                for_latent += given * values
            else:
                for_text += given * values
            given *= tl.where(latent, latent_gain, text_gain)
            given = (given - values * (tl.sum(given * values, axis=1) / SIZE)[:, None]) * inverse
        tl.store(out + line, given.to(out.dtype.element_ty), mask=mask)
        if latent == 0:
            for_bias += given
        line += 3 * width
        if PART == 0:
            source += q_stride
        elif PART == 1:
            source += k_stride
        else:
            source += v_stride
    tl.store(bias_sums + tile.to(tl.int64) * 3 * width + PART * width + place, for_bias, mask=mask)
    if PART < 2:
        spot = weight_sums + tile.to(tl.int64) * 4 * SIZE + PART * SIZE + tl.arange(0, BLOCK)
        in_head = tl.arange(0, BLOCK) < SIZE
        tl.store(spot, tl.sum(for_text, axis=0), mask=in_head)
        tl.store(spot + 2 * SIZE, tl.sum(for_latent, axis=0), mask=in_head)


@triton.jit
def _tanh_gelu(x):
    """Return gelu by tanh, and its slope."""
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    tanh = 2 * tl.sigmoid(2 * inner) - 1
    slope = 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * 0.7978845608028654 * (1 + 0.134145 * x * x)
    return 0.5 * x * (1 + tanh), slope


@triton.jit
def _gelu(x, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    active, _slope = _tanh_gelu(tl.load(x + place, mask=mask, other=0.0).to(tl.float32))
    tl.store(out + place, active.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gelu_backward(
    gradient, x, active, out, sums, num_rows, N, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write gelu of x, its gradient, and the column sums of the gradient over ROWS rows."""
    start = tl.program_id(0) * ROWS
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = tl.zeros([TILE, BLOCK], dtype=tl.float32)
    row = start + tl.arange(0, TILE)
    place = row.to(tl.int64)[:, None] * N + column[None, :]
    for _first in range(start, tl.minimum(start + ROWS, num_rows), TILE):
        mask = (row < num_rows)[:, None] & (column < N)[None, :]
        given = tl.load(gradient + place, mask=mask, other=0.0).to(tl.float32)
        value, slope = _tanh_gelu(tl.load(x + place, mask=mask, other=0.0).to(tl.float32))
        tl.store(active + place, value.to(active.dtype.element_ty), mask=mask)
        given *= slope
        tl.store(out + place, given.to(out.dtype.element_ty), mask=mask)
        found += given
        row += TILE
        place += TILE * N
    tl.store(sums + tl.program_id(0).to(tl.int64) * N + column, tl.sum(found, axis=0), mask=column < N)


def modulate(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    gate: torch.Tensor | None,
    shift: torch.Tensor,
    scale: torch.Tensor,
    segments: Segments,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    total = x if branch is None else torch.empty_like(x)
    out = torch.empty_like(x)
    mean, rstd = (torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2))
    _modulate[(len(segments.starts),)](
        x,
        x if branch is None else branch,
        shift if gate is None else gate,
        shift,
        scale,
        total,
        out,
        mean,
        rstd,
        segments.starts,
        segments.stops,
        segments.rows,
        _common_stride(shift, scale, gate),
        EPS,
        ADD=branch is not None,
        **_row(x),
    )
    return total, out, mean, rstd


def modulate_backward(
    gradient: torch.Tensor,
    total: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    scale: torch.Tensor,
    residual: torch.Tensor | None,
    branch: torch.Tensor | None,
    gate: torch.Tensor | None,
    segments: Segments,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    gradient = gradient.contiguous()
    found = torch.empty_like(total)
    for_branch = None if branch is None else torch.empty_like(total)
    width, num_chunks = total.shape[1], len(segments.starts)
    sums = torch.empty(num_chunks, 4 * width, dtype=torch.float32, device=total.device)
    _modulate_backward[(num_chunks,)](
        gradient,
        total,
        mean,
        rstd,
        scale,
        total if residual is None else residual.contiguous(),
        total if branch is None else branch,
        scale if gate is None else gate,
        found,
        found if for_branch is None else for_branch,
        sums,
        segments.starts,
        segments.stops,
        segments.rows,
        _common_stride(scale, gate),
        RESIDUAL=residual is not None,
        ADD=branch is not None,
        **_row(total),
    )
    num_rows = len(segments.row_chunks) - 1
    by_row = torch.empty(num_rows, 4, width, dtype=torch.float32, device=total.device)
    used = (4 if branch is not None else 2) * width
    _sum_chunks[(num_rows, triton.cdiv(used, 256))](sums, by_row, segments.row_chunks, 4 * width, BLOCK=256)
    return found, for_branch, by_row


def normalize_heads(
    qkv: torch.Tensor, norms: HeadNorms, is_latent: torch.Tensor, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    count, width = len(qkv), qkv.shape[1] // 3
    q, k = (torch.empty(count, width, dtype=qkv.dtype, device=qkv.device) for _ in range(2))
    tile = 4
    _normalize_heads[(triton.cdiv(count, tile),)](
        qkv, q, k, is_latent, *norms, count, HEAD_EPS, TILE=tile, num_warps=4, **_heads(width, heads)
    )
    return q, k


def normalize_heads_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qkv: torch.Tensor,
    norms: HeadNorms,
    is_latent: torch.Tensor,
    heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count, width = len(qkv), qkv.shape[1] // 3
    num_tiles = triton.cdiv(count, CHUNK)
    out = torch.empty_like(qkv)
    weight_sums = torch.empty(num_tiles, 4, width // heads, dtype=torch.float32, device=qkv.device)
    bias_sums = torch.empty(num_tiles, 3 * width, dtype=torch.float32, device=qkv.device)
    for part in range(3):
        _normalize_heads_backward[(num_tiles,)](
            q,
            k,
            v,
            qkv,
            out,
            is_latent,
            *norms,
            weight_sums,
            bias_sums,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            count,
            HEAD_EPS,
            TILE=CHUNK,
            PART=part,
            num_warps=4,
            **_heads(width, heads),
        )
    return out, weight_sums.sum(0), bias_sums.sum(0)


def gelu(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    _gelu[(triton.cdiv(x.numel(), 2048),)](x, out, x.numel(), BLOCK=2048, num_warps=8)
    return out


def gelu_backward(gradient: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    active, out = torch.empty_like(x), torch.empty_like(x)
    num_rows, width = x.shape
    num_parts, block = triton.cdiv(num_rows, GELU_ROWS), 512
    sums = torch.empty(num_parts, width, dtype=torch.float32, device=x.device)
    _gelu_backward[(num_parts, triton.cdiv(width, block))](
        gradient.contiguous(), x, active, out, sums, num_rows, width,
        ROWS=GELU_ROWS, TILE=4, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return active, out, sums.sum(0)


def _row(x: torch.Tensor) -> dict[str, Any]:
    block = triton.next_power_of_2(x.shape[1])
    return {"N": x.shape[1], "BLOCK": block, "num_warps": 4 if block <= 2048 else 8}


def _heads(width: int, heads: int) -> dict[str, int]:
    size = width // heads
    return {
        "HEADS": heads,
        "SIZE": size,
        "ALL": triton.next_power_of_2(heads),
        "BLOCK": triton.next_power_of_2(size),
    }


def _common_stride(*per_row: torch.Tensor | None) -> int:
    """Return the distance between the rows of modulations, which are parts of one tensor."""
    strides = {part.stride(0) for part in per_row if part is not None}
    assert len(strides) == 1
    return strides.pop()
