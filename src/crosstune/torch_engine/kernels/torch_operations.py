"""Implement the operations of the fast decoder layers with plain torch, on any device, in fp32 or wider inside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812

from crosstune.torch_engine.kernels.operations import (
    E4M3_MAX,
    SMALLEST_AMAX,
    Heads,
    Norm,
    QKNorms,
    Quantize,
    Rows,
    Triple,
)


def rms_norm(
    x: torch.Tensor,
    added: torch.Tensor | None,
    norm: Norm,
    out: torch.Tensor,
    quantize: Quantize | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Rows]:
    total = x if added is None else x + added.to(x.dtype)
    values = _wide(total)
    rstd = torch.rsqrt(values.square().mean(-1) + norm.eps)
    return total, rstd, _emit(values * rstd[:, None] * _gain(norm, values), out, quantize)


def rms_norm_again(total: torch.Tensor, rstd: torch.Tensor, norm: Norm, out: torch.Tensor) -> torch.Tensor:
    values = _wide(total)
    out.copy_(values * rstd[:, None] * _gain(norm, values))
    return out


def rms_norm_backward(
    gradient: torch.Tensor,
    total: torch.Tensor,
    rstd: torch.Tensor,
    norm: Norm,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    values = _wide(total) * rstd[..., None]
    weighted = _wide(gradient) * _gain(norm, values)
    found = (weighted - values * (weighted * values).mean(-1, keepdim=True)) * rstd[..., None]
    return (found if residual is None else found + residual).to(total.dtype)


def rotate(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: Heads, norms: QKNorms) -> Triple:
    parts = split_heads(qkv, heads)
    turned = [
        _turn(_head_norm(part, norm), cos, sin, heads.rotary)
        for part, norm in zip(parts[:2], norms or (None, None), strict=True)
    ]
    if norms is None:
        for part, values in zip(parts[:2], turned, strict=True):
            part.copy_(values)
        return parts
    return turned[0].to(qkv.dtype), turned[1].to(qkv.dtype), parts[2]


def rotate_backward(
    gradients: Triple,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: Heads,
    norms: QKNorms,
    raw: torch.Tensor | None,
    quantize: Quantize | None = None,
) -> Rows:
    flat = [gradient.reshape(-1, *gradient.shape[-2:]) for gradient in gradients]
    found = [_turn(gradient, cos, -sin, heads.rotary) for gradient in flat[:2]]
    if norms is not None and raw is not None:
        for index, (part, norm) in enumerate(zip(split_heads(raw, heads)[:2], norms, strict=True)):
            values = _wide(part)
            rstd = torch.rsqrt(values.square().mean(-1) + norm.eps)
            found[index] = rms_norm_backward(found[index], values, rstd, norm, None)
    packed = torch.cat([part.flatten(1) for part in (*found, _wide(flat[2]))], dim=1)
    return _emit(packed, torch.empty_like(packed, dtype=gradients[0].dtype), quantize)


def gate(gate_up: torch.Tensor, kind: str, out: torch.Tensor, quantize: Quantize | None = None) -> Rows:
    gates, ups = _wide(gate_up).chunk(2, dim=-1)
    active = _ACTIVATIONS[kind][0](gates)
    if quantize is None and out.dtype == active.dtype:
        return Rows(torch.mul(active, ups, out=out))
    return _emit(active * ups, out, quantize)


def gate_backward(
    gradient: torch.Tensor,
    gate_up: torch.Tensor,
    kind: str,
    product: torch.Tensor | None,
    quantize: Quantize | None = None,
) -> Rows:
    gates, ups = _wide(gate_up).chunk(2, dim=-1)
    activate, activate_backward = _ACTIVATIONS[kind]
    active = activate(gates)
    if product is not None:
        product.copy_(active * ups)
    wide = _wide(gradient)
    found = torch.empty_like(gate_up, dtype=gates.dtype)
    gate_part, up_part = found.chunk(2, dim=-1)
    gate_part.copy_(activate_backward(wide * ups, gates))
    torch.mul(wide, active, out=up_part)
    if quantize is None and found.dtype == gate_up.dtype:
        return Rows(found)
    return _emit(found, torch.empty_like(gate_up), quantize)


def quantize_rows(values: torch.Tensor, quantize: Quantize) -> Rows:
    return _quantized(values, _wide(values), quantize)


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, *, gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    log_probs = F.log_softmax(_wide(logits), dim=-1)
    total = F.nll_loss(log_probs, targets, reduction="sum")
    if not gradient:
        return total, None
    probs = log_probs.exp_()
    probs.scatter_add_(1, targets[:, None], probs.new_full((len(probs), 1), -1.0))
    return total, probs.to(logits.dtype)


def split_heads(qkv: torch.Tensor, heads: Heads) -> Triple:
    """Return views of the queries, keys and values of packed rows: tokens x heads x size."""
    by_head = qkv.view(len(qkv), -1, heads.size)
    q, k, v = by_head.split([heads.num_queries, heads.num_keys, heads.num_keys], dim=1)
    return q, k, v


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _gain(norm: Norm, values: torch.Tensor) -> torch.Tensor:
    weight = norm.weight.to(values.dtype)
    return weight + norm.offset if norm.offset else weight


def _head_norm(part: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    values = _wide(part)
    if norm is None:
        return values
    rstd = torch.rsqrt(values.square().mean(-1, keepdim=True) + norm.eps)
    return values * rstd * _gain(norm, values)


def _turn(values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: int) -> torch.Tensor:
    """Rotate tokens x heads x size by tables of period x (rotary / 2), whose rows repeat over the batch."""
    half = rotary // 2
    wide = _wide(values)
    repeats = len(wide) // len(cos)
    cos, sin = (table.to(wide.dtype).repeat(repeats, 1)[:, None] for table in (cos, sin))
    first, second, rest = wide.split([half, half, wide.shape[-1] - rotary], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


_aten = torch.ops.aten
_ACTIVATIONS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "silu": (F.silu, _aten.silu_backward),
    "gelu": (F.gelu, _aten.gelu_backward),
    "gelu_tanh": (
        partial(F.gelu, approximate="tanh"),
        partial(_aten.gelu_backward, approximate="tanh"),
    ),
}
"""Each activation, and the gradient of its input from that of its output and the input."""


def _emit(values: torch.Tensor, out: torch.Tensor, quantize: Quantize | None) -> Rows:
    out.copy_(values)
    return Rows(out) if quantize is None else _quantized(out, values, quantize)


def _quantized(out: torch.Tensor, values: torch.Tensor, quantize: Quantize) -> Rows:
    if quantize.columns is not None:
        values = values * quantize.columns
    scale = values.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_AMAX) / E4M3_MAX
    return Rows(out, (values / scale).to(torch.float8_e4m3fn), scale.float())
