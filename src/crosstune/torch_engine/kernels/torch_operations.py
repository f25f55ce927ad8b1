"""Implement the operations of the fast layers with plain torch, on any device.

Norms, rotations and the loss are computed in fp32 or wider; gated activations in the dtype of their inputs, as in
transformers. On a CPU, passes over memory dominate the time, so operations write in place where possible.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812

from crosstune.estimate.fast_layers import LOGITS_IN_CACHE
from crosstune.torch_engine.kernels.operations import Heads, Norm, QKNorms, Quantize, Rows, Triple
from crosstune.torch_engine.quant.fp8 import LARGEST, SMALLEST_AMAX

_aten = torch.ops.aten
_ACTIVATIONS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "silu": (F.silu, _aten.silu_backward.grad_input),
    "gelu": (F.gelu, _aten.gelu_backward.grad_input),
    "gelu_tanh": (
        partial(F.gelu, approximate="tanh"),
        partial(_aten.gelu_backward.grad_input, approximate="tanh"),
    ),
}
"""Each activation, and its gradient with respect to the input. torch computes 16-bit numbers in fp32, without copies."""


def rms_norm(
    x: torch.Tensor,
    added: torch.Tensor | None,
    norm: Norm,
    out: torch.Tensor,
    quantize: Quantize | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Rows]:
    """Return x + added, 1 / rms of each row, and the normalized rows in `out`."""
    total = x if added is None else x + added.to(x.dtype)
    values = _wide(total)
    length = torch.linalg.vector_norm(values, dim=-1)
    rstd = torch.rsqrt(length.square_().div_(values.shape[-1]).add_(norm.eps))
    return total, rstd, _normalize(values, rstd, norm, out, quantize)


def rebuild_rms_norm(total: torch.Tensor, rstd: torch.Tensor, norm: Norm, out: torch.Tensor) -> torch.Tensor:
    """Rebuild the normalized rows in `out`."""
    _normalize(_wide(total), rstd, norm, out, None)
    return out


def rms_norm_backward(
    gradient: torch.Tensor,
    total: torch.Tensor,
    rstd: torch.Tensor,
    norm: Norm,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write the gradient of the norm's input, plus `residual`, into `out`."""
    values = _wide(total)
    found = _wide(gradient) * _gain(norm, values)
    along = (found * values).sum(-1).mul_(rstd).mul_(rstd).mul_(rstd).div_(-values.shape[-1])
    found.mul_(rstd[..., None]).addcmul_(values, along[..., None])
    if residual is not None and out.dtype == found.dtype:
        return torch.add(found, residual, out=out)
    return out.copy_(found if residual is None else found.add_(residual))


def rotate(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: Heads, norms: QKNorms) -> Triple:
    """Return queries, keys and values of packed rows, with queries and keys normalized and rotated; without norms, rotated in
    place."""
    parts = split_heads(qkv, heads)
    if norms is None:
        _turn(_rotated(qkv, heads), cos, sin, heads.rotary)
        return parts
    turned = [_head_norm(part, norm) for part, norm in zip(parts[:2], norms, strict=True)]
    for part in turned:
        _turn(part, cos, sin, heads.rotary)
    return turned[0].to(qkv.dtype), turned[1].to(qkv.dtype), parts[2]


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
    """Write the gradient of the packed rows into `out`. `raw`: the rows before the norms, if there are norms."""
    for part, gradient in zip(split_heads(out, heads), gradients, strict=True):
        part.copy_(gradient.flatten(0, 1))
    _turn(_rotated(out, heads), cos, -sin, heads.rotary)
    if norms is not None and raw is not None:
        pairs = zip(split_heads(out, heads)[:2], split_heads(raw, heads)[:2], norms, strict=True)
        for gradient, part, norm in pairs:
            values = _wide(part)
            rstd = torch.rsqrt(values.square().mean(-1) + norm.eps)
            rms_norm_backward(gradient, values, rstd, norm, None, gradient)
    return Rows(out) if quantize is None else quantize_rows(out, quantize)


def gate(gate_up: torch.Tensor, kind: str, out: torch.Tensor, quantize: Quantize | None = None) -> Rows:
    """Write act(gate) * up into `out`."""
    gates, ups = gate_up.chunk(2, dim=-1)
    torch.mul(_ACTIVATIONS[kind][0](gates), ups, out=out)
    return Rows(out) if quantize is None else quantize_rows(out, quantize)


def gate_backward(
    gradient: torch.Tensor,
    gate_up: torch.Tensor,
    kind: str,
    product: torch.Tensor | None,
    out: torch.Tensor,
    quantize: Quantize | None = None,
) -> Rows:
    """Write the packed gradients of gate and up into `out`; rebuild act(gate) * up in `product`, if given."""
    gates, ups = gate_up.chunk(2, dim=-1)
    activate, activate_backward = _ACTIVATIONS[kind]
    active = activate(gates)
    if product is not None:
        torch.mul(active, ups, out=product)
    gate_part, up_part = out.chunk(2, dim=-1)
    torch.mul(gradient, active, out=up_part)
    torch.mul(gradient, ups, out=active)  # its memory is reused
    activate_backward(active, gates, grad_input=gate_part)
    return Rows(out) if quantize is None else quantize_rows(out, quantize)


def quantize_rows(values: torch.Tensor, quantize: Quantize) -> Rows:
    """Return rows with their e4m3 copy."""
    return _quantized(values, _wide(values), quantize)


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, *, gradient: bool, summed: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the cross entropy in fp32, summed or per row, and the gradient of the logits, which may overwrite them."""
    losses = list[torch.Tensor]()
    total = logits.new_zeros((), dtype=torch.promote_types(logits.dtype, torch.float32))
    num_rows = max(1, LOGITS_IN_CACHE // logits.shape[1])
    for rows, wanted in zip(logits.split(num_rows), targets.split(num_rows), strict=True):
        values, places = _wide(rows), wanted[:, None]
        largest, wanted_logits = values.amax(-1, keepdim=True), values.gather(1, places)
        probs = (values.sub_(largest) if gradient else values - largest).exp_()
        sums = probs.sum(-1, keepdim=True)
        loss = sums.log() + largest - wanted_logits
        if summed:
            total += loss.sum()
        else:
            losses.append(loss[:, 0])
        if gradient:
            probs.div_(sums).scatter_add_(1, places, probs.new_full((len(probs), 1), -1.0))
            if probs.dtype != rows.dtype:
                rows.copy_(probs)
    return total if summed else torch.cat(losses), logits if gradient else None


def split_heads(qkv: torch.Tensor, heads: Heads) -> Triple:
    """Return views of the queries, keys and values of packed rows: tokens x heads x size."""
    by_head = qkv.unflatten(1, (-1, heads.size))
    q, k, v = by_head.split([heads.num_queries, heads.num_keys, heads.num_keys], dim=1)
    return q, k, v


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _gain(norm: Norm, values: torch.Tensor) -> torch.Tensor:
    weight = norm.weight.to(values.dtype)
    return weight + norm.offset if norm.offset else weight


def _head_norm(part: torch.Tensor, norm: Norm) -> torch.Tensor:
    values = _wide(part)
    rstd = torch.rsqrt(values.square().mean(-1, keepdim=True) + norm.eps)
    return values * rstd * _gain(norm, values)


def _rotated(qkv: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Return a view of the adjacent queries and keys of packed rows: tokens x heads x size."""
    return qkv.unflatten(1, (-1, heads.size))[:, : heads.num_queries + heads.num_keys]


def _turn(values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: int) -> None:
    """Rotate tokens x heads x size in place by tables of period x (rotary / 2), whose rows repeat over the batch."""
    part = values[..., :rotary]
    wide = _wide(part)
    first, second = wide.unflatten(0, (-1, len(cos))).chunk(2, dim=-1)
    cos, sin = (table.to(wide.dtype)[:, None] for table in (cos, sin))
    across = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(across)
    if wide.dtype != values.dtype:
        part.copy_(wide)


def _normalize(
    values: torch.Tensor, rstd: torch.Tensor, norm: Norm, out: torch.Tensor, quantize: Quantize | None
) -> Rows:
    """Write normalized rows into `out`, in as few passes as the dtype allows."""
    scaled = values * rstd[:, None]
    if quantize is None and out.dtype == values.dtype:
        return Rows(torch.mul(scaled, _gain(norm, values), out=out))
    out.copy_(scaled.mul_(_gain(norm, values)))
    return Rows(out) if quantize is None else _quantized(out, scaled, quantize)


def _quantized(out: torch.Tensor, values: torch.Tensor, quantize: Quantize) -> Rows:
    assert not quantize.room, "plain torch does not support fp8 adapters"
    if quantize.columns is not None:
        values = values * quantize.columns
    scale = values.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_AMAX) / LARGEST
    return Rows(out, (values / scale).to(torch.float8_e4m3fn), scale.float())
