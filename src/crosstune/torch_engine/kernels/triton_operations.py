"""Implement the operations of the fast layers with Triton, for GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton

from crosstune.torch_engine.kernels import triton_fp8_adapters, triton_layers
from crosstune.torch_engine.kernels.operations import (
    LINES_IN_TILE,
    NUM_PARTS,
    Heads,
    Norm,
    QKNorms,
    Quantize,
    Rows,
    Triple,
)
from crosstune.torch_engine.kernels.torch_operations import split_heads

_KINDS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
_CHUNK = 2048
_NF4_WORDS = 256
"""Words of 4-bit weights that a program reads at once, one per thread."""
_COPY_ROWS, _COPY_COLUMNS = 32, 64
"""The tile of a matrix that a program copies."""


def rms_norm(
    x: torch.Tensor,
    added: torch.Tensor | None,
    norm: Norm,
    out: torch.Tensor,
    quantize: Quantize | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Rows]:
    assert quantize is None or quantize.columns is None, "inputs are quantized without column factors"
    x = x.contiguous()
    total = x if added is None else torch.empty_like(x)
    rstd = torch.empty(len(x), dtype=torch.float32, device=x.device)
    rows = _empty_rows(out, quantize)
    triton_layers.rms_norm[(len(x),)](
        x,
        x if added is None else added.contiguous(),
        total,
        out,
        rstd,
        norm.weight,
        _packed(rows),
        rstd if rows.scale is None else rows.scale,
        out.stride(0),
        _packed_stride(rows),
        norm.eps,
        norm.offset,
        ADD=added is not None,
        QUANTIZE=quantize is not None,
        **_whole_row(x),
    )
    return total, rstd, rows


def rebuild_rms_norm(total: torch.Tensor, rstd: torch.Tensor, norm: Norm, out: torch.Tensor) -> torch.Tensor:
    triton_layers.rebuild_rms_norm[(len(total),)](
        total, rstd, norm.weight, out, out.stride(0), norm.offset, **_whole_row(total)
    )
    return out


def rms_norm_backward(
    gradient: torch.Tensor,
    total: torch.Tensor,
    rstd: torch.Tensor,
    norm: Norm,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    gradient = _dense_rows(gradient)
    residual = None if residual is None else _dense_rows(residual)
    triton_layers.rms_norm_backward[(len(total),)](
        gradient,
        total,
        rstd,
        norm.weight,
        total if residual is None else residual,
        out,
        gradient.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        norm.offset,
        ADD=residual is not None,
        **_whole_row(total),
    )
    return out


def rotate(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: Heads, norms: QKNorms) -> Triple:
    out = qkv
    if norms is not None:
        width = (heads.num_queries + heads.num_keys) * heads.size
        out = torch.empty(len(qkv), width, dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm = norms if norms is not None else (Norm(cos, 0.0), Norm(cos, 0.0))
    triton_layers.rotate[(len(qkv), 2)](
        qkv,
        out,
        cos,
        sin,
        q_norm.weight,
        k_norm.weight,
        len(cos),
        qkv.stride(0),
        out.stride(0),
        q_norm.eps,
        q_norm.offset,
        QUERIES=heads.num_queries,
        KEYS=heads.num_keys,
        NORM=norms is not None,
        num_warps=4,
        **_head_blocks(heads, max(heads.num_queries, heads.num_keys)),
    )
    q, k, v = split_heads(qkv, heads)
    if norms is None:
        return q, k, v
    turned = out.view(len(out), -1, heads.size)
    return turned[:, : heads.num_queries], turned[:, heads.num_queries :], v


def rotate_backward(
    gradients: Triple,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: Heads,
    norms: QKNorms,
    raw: torch.Tensor | None,
    out: torch.Tensor,
    quantize: Quantize | None = None,
) -> Rows:
    length = gradients[0].shape[1]
    start = 0
    counts = (heads.num_queries, heads.num_keys, heads.num_keys)
    for index, (gradient, count) in enumerate(zip(gradients, counts, strict=True)):
        gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        norm = norms[index] if norms is not None and index < 2 else None
        blocks = _head_blocks(heads, count, turned=index < 2)
        triton_layers.rotate_backward[(len(out),)](
            gradient,
            out,
            cos,
            sin,
            out if raw is None else raw,
            cos if norm is None else norm.weight,
            len(cos),
            length,
            gradient.stride(0),
            gradient.stride(1),
            gradient.stride(2),
            out.stride(0),
            0 if raw is None else raw.stride(0),
            start,
            0.0 if norm is None else norm.eps,
            0.0 if norm is None else norm.offset,
            COUNT=count,
            NORM=norm is not None,
            num_warps=4,
            **blocks | {"REST": max(1, blocks["REST"])},
        )
        start += count * heads.size
    return Rows(out) if quantize is None else quantize_rows(out, quantize)


def gate(gate_up: torch.Tensor, kind: str, out: torch.Tensor, quantize: Quantize | None = None) -> Rows:
    assert quantize is None or quantize.columns is None, "inputs are quantized without column factors"
    rows = _empty_rows(out, quantize)
    triton_layers.gate_product[(len(gate_up),)](
        gate_up,
        out,
        _packed(rows),
        out if rows.scale is None else rows.scale,
        out.stride(0),
        _packed_stride(rows),
        N=out.shape[1],
        BLOCK=_chunk(out.shape[1]),
        KIND=_KINDS[kind],
        QUANTIZE=quantize is not None,
        num_warps=8,
    )
    return rows


def gate_backward(
    gradient: torch.Tensor,
    gate_up: torch.Tensor,
    kind: str,
    product: torch.Tensor | None,
    out: torch.Tensor,
    quantize: Quantize | None = None,
) -> Rows:
    gradient = _dense_rows(gradient)
    rows = _empty_rows(out, quantize)
    triton_layers.gate_backward[(len(gate_up),)](
        gradient,
        gate_up,
        gate_up if product is None else product,
        out,
        gate_up if quantize is None else quantize.columns,
        _packed(rows),
        gate_up if rows.scale is None else rows.scale,
        gradient.stride(0),
        0 if product is None else product.stride(0),
        out.stride(0),
        _packed_stride(rows),
        N=gate_up.shape[1] // 2,
        BLOCK=_chunk(gate_up.shape[1] // 2),
        KIND=_KINDS[kind],
        REBUILD=product is not None,
        QUANTIZE=quantize is not None,
        num_warps=8,
    )
    return rows


def quantize_rows(values: torch.Tensor, quantize: Quantize) -> Rows:
    values = _dense_rows(values)
    rows = _empty_rows(values, quantize)
    triton_layers.quantize_rows[(len(values),)](
        values,
        values if quantize.columns is None else quantize.columns,
        _packed(rows),
        rows.scale,
        values.stride(0),
        _packed_stride(rows),
        N=values.shape[1],
        BLOCK=_chunk(values.shape[1]),
        SCALED=quantize.columns is not None,
        num_warps=8,
    )
    return rows


def prepend_low(
    rows: Rows, low: torch.Tensor, count: int, factors: torch.Tensor, columns: torch.Tensor | None = None
) -> None:
    """Write the first `count` columns of `low`, times a factor per column, to the left of the e4m3 copy of rows, in two parts.
    `columns`: the factors that the rows were multiplied by before."""
    assert rows.packed is not None
    num_rows, width = rows.values.shape
    room = rows.packed.shape[1] - width
    values = _dense_rows(rows.values)
    triton_fp8_adapters.prepend_low[(num_rows,)](
        low,
        factors,
        values,
        factors if columns is None else columns,
        rows.packed,
        rows.scale,
        low.stride(0),
        values.stride(0),
        rows.packed.stride(0),
        count,
        room,
        N=width,
        COLUMNS=triton.next_power_of_2(count),
        BLOCK=1024,
        SCALED=columns is not None,
        SPARE=triton.next_power_of_2(max(1, room - NUM_PARTS * count)),
        num_warps=1,
    )


def write_fp8_adapters(
    table: torch.Tensor,
    tiles: tuple[torch.Tensor, torch.Tensor],
    *,
    largest: torch.Tensor,
    factors: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Write the current adapters of groups in fp8 next to their weights. `table` has the addresses of each side, `tiles` the side
    and the first line of each program."""
    blocks = {
        "DTYPE": {torch.bfloat16: triton.language.bfloat16, torch.float32: triton.language.float32}[dtype],
        "LINES": LINES_IN_TILE,
        "COLUMNS": factors.shape[1],
    }
    grid = (len(tiles[0]),)
    largest.zero_()
    triton_fp8_adapters.largest_of_columns[grid](table, *tiles, largest, **blocks)
    triton_fp8_adapters.write_parts[grid](table, *tiles, largest, factors, **blocks)


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, *, gradient: bool, summed: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    triton_layers.cross_entropy[(len(logits),)](
        logits, targets, losses, logits.shape[1], BLOCK=4096, GRADIENT=gradient, num_warps=8
    )
    return losses.sum() if summed else losses, logits if gradient else None


def make_nf4_dense(
    tensors: Mapping[str, torch.Tensor],
    facts: Mapping[str, Any],
    out: torch.Tensor,
    *,
    row_scales: torch.Tensor | None = None,
    copied: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Dequantize 4-bit weights into `out`, whose rows may be strided, with the same bits as bitsandbytes. `row_scales` divide
    them, for an `out` in e4m3. `copied`: a matrix and the target of its copy."""
    rows, num_weights = out.shape
    source, target = copied if copied is not None else (out, out)
    absmax = tensors["absmax"]
    nested = tensors.get("nested_absmax")
    num_words = rows * num_weights // 8
    num_programs = triton.cdiv(num_words, 2 * _NF4_WORDS)
    if copied is not None:
        num_programs += triton.cdiv(source.shape[0], _COPY_ROWS) * triton.cdiv(source.shape[1], _COPY_COLUMNS)
    triton_layers.nf4_words[(num_programs,)](
        tensors["packed"].view(-1).view(torch.int32),
        absmax,
        tensors["quant_map"],
        absmax if nested is None else tensors["nested_quant_map"],
        absmax if nested is None else nested,
        absmax if nested is None else tensors["nested_offset"],
        out,
        absmax if row_scales is None else row_scales,
        source,
        target,
        num_words,
        out.stride(0),
        num_weights,
        source.shape[0],
        source.shape[1],
        source.stride(0),
        target.stride(0),
        GROUP=facts["blocksize"],
        NESTED=0 if nested is None else facts["nested_blocksize"],
        WORDS=_NF4_WORDS,
        SCALED=row_scales is not None,
        COPY=copied is not None,
        COPY_ROWS=_COPY_ROWS,
        COPY_COLUMNS=_COPY_COLUMNS,
        num_warps=_NF4_WORDS // 32,
        enable_fp_fusion=False,
    )


def _empty_rows(values: torch.Tensor, quantize: Quantize | None) -> Rows:
    if quantize is None:
        return Rows(values)
    num_rows, width = values.shape
    packed = torch.empty(num_rows, width + quantize.room, dtype=torch.float8_e4m3fn, device=values.device)
    return Rows(values, packed, torch.empty(len(values), 1, dtype=torch.float32, device=values.device))


def _packed(rows: Rows) -> torch.Tensor:
    """Return the e4m3 copy without its left columns, or a placeholder if there is no copy."""
    return (
        rows.values if rows.packed is None else rows.packed[:, rows.packed.shape[1] - rows.values.shape[1] :]
    )


def _packed_stride(rows: Rows) -> int:
    return 0 if rows.packed is None else rows.packed.stride(0)


def _dense_rows(values: torch.Tensor) -> torch.Tensor:
    return values if values.stride(-1) == 1 else values.contiguous()


def _whole_row(values: torch.Tensor) -> dict[str, Any]:
    """Return the settings of a kernel with a whole row per program."""
    block = triton.next_power_of_2(values.shape[1])
    return {
        "N": values.shape[1],
        "BLOCK": block,
        "num_warps": 4 if block <= 2048 else 8 if block <= 8192 else 16,
    }


def _chunk(width: int) -> int:
    return min(_CHUNK, int(triton.next_power_of_2(width)))


def _head_blocks(heads: Heads, count: int, *, turned: bool = True) -> dict[str, int]:
    half = heads.rotary // 2 if turned else 0
    rest = heads.size - 2 * half
    return {
        "SIZE": heads.size,
        "HALF": half,
        "HEADS": triton.next_power_of_2(count),
        "PAIRS": triton.next_power_of_2(max(1, half)),
        "REST": triton.next_power_of_2(rest) if rest else 0,
    }
