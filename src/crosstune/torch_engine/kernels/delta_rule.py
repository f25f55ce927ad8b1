"""The gated delta rule of linear attention (Qwen3.5, Qwen3-Next, OLMo Hybrid), in chunks, in plain torch.

A chunk changes the state S to decay * S + K^T (U - W S), which is linear in S. transformers computes the parenthesis in turn
with the states; here each chunk's matrix -K^T W is computed first, for all chunks at once, so that one matmul per chunk is
left to do in turn.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from crosstune.torch_engine.kernels.chunks import cut, multiply, tensor_cores

_SMALL = 1e-6


def chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output, rows x tokens x heads x size, and the last state if asked; in fp32 inside.

    Queries, keys and values are rows x tokens x heads x size; a head of queries and keys may serve several heads of values.
    `g` is the logarithm of each token's decay, and `beta` its share of the old value to replace.
    """
    assert cu_seqlens is None, "packed rows are computed document by document"
    dtype, length, num_heads = query.dtype, query.shape[1], key.shape[2]
    is_rounded = dtype != torch.float32
    with torch.autocast(query.device.type, enabled=False):
        query, key, value, g, beta = (cut(x, chunk_size) for x in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _SMALL) for x in (query, key))
        query = query * query.shape[-1] ** -0.5
        query, key = query.unsqueeze(2), key.unsqueeze(2)
        value, g, beta = (x.unflatten(1, (num_heads, -1)) for x in (value, g, beta))

        decay = g.cumsum(-1)
        upper = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=query.device).triu(1)
        between = (decay[..., :, None] - decay[..., None, :]).masked_fill(upper, -torch.inf).exp()
        decayed, rest = decay.exp(), (decay[..., -1:] - decay).exp()

        product = functools.partial(multiply, is_rounded=is_rounded)
        turned = key.transpose(-1, -2)
        inverse = _Inverse.apply(product(key, turned) * (between * beta[..., None]), is_rounded)
        new = product(inverse, value * beta[..., None])
        read = product(inverse, key * (beta * decayed)[..., None])
        written = (key * rest[..., None]).transpose(-1, -2)
        before, last = _States.apply(
            product(written, read),
            product(written, new),
            decayed[..., -1],
            None if initial_state is None else initial_state.float().unflatten(1, (num_heads, -1)),
            is_rounded,
        )
        inside = product(query, turned) * between
        seen = query * decayed[..., None] - product(inside, read)
        out = product(seen, before) + product(inside, new)
    out = out.flatten(1, 2).flatten(2, 3)[:, :, :length].transpose(1, 2)
    out = out.to(dtype, memory_format=torch.contiguous_format)
    return out, last.flatten(1, 2) if output_final_state else None


class _Inverse(torch.autograd.Function):
    """The inverse of I + L, where L is the part of a square matrix below its diagonal.

    [[A, 0], [C, B]] has the inverse [[A', 0], [-B' C A', B']], so that blocks of twice the size take two matmuls.
    """

    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor, is_rounded: bool) -> torch.Tensor:
        size = matrix.shape[-1]
        place = torch.arange(size, device=matrix.device)
        inverse = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
        block = 1
        while block < size:
            own = place // block
            corner = (own[:, None] == own + 1) & (own % 2 == 0)
            part = matrix * corner
            inverse = inverse - (part if block == 1 else inverse @ part @ inverse)
            block *= 2
        ctx.save_for_backward(inverse)
        ctx.is_rounded = is_rounded
        return inverse

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        [inverse] = ctx.saved_tensors
        turned = inverse.transpose(-1, -2)
        with tensor_cores(ctx.is_rounded):
            return (turned @ gradients[0] @ turned).tril(-1).neg_(), None


class _States(torch.autograd.Function):
    """The state before each chunk, and the last: S' = keep * S - map S + added, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        maps: torch.Tensor,
        added: torch.Tensor,
        keep: torch.Tensor,
        first: torch.Tensor | None,
        is_rounded: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before = torch.empty_like(added)
        state = torch.zeros_like(added[..., 0, :, :]) if first is None else first
        with tensor_cores(is_rounded):
            for chunk in range(added.shape[-3]):
                before[..., chunk, :, :] = state
                kept = torch.addcmul(added[..., chunk, :, :], state, keep[..., chunk, None, None])
                state = _subtract_product(kept, maps[..., chunk, :, :], state)
        ctx.save_for_backward(maps, before, keep)
        ctx.has_first, ctx.is_rounded = first is not None, is_rounded
        return before, state

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        maps, before, keep = ctx.saved_tensors
        d_before, d_state = gradients
        d_after = torch.empty_like(before)
        with tensor_cores(ctx.is_rounded):
            for chunk in reversed(range(before.shape[-3])):
                d_after[..., chunk, :, :] = d_state
                kept = torch.addcmul(d_before[..., chunk, :, :], d_state, keep[..., chunk, None, None])
                d_state = _subtract_product(kept, maps[..., chunk, :, :].transpose(-1, -2), d_state)
            d_maps = (d_after @ before.transpose(-1, -2)).neg_()
        d_keep = (d_after * before).sum((-2, -1))
        return d_maps, d_after, d_keep, d_state if ctx.has_first else None, None


def _subtract_product(x: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    flat = torch.baddbmm(x.flatten(0, -3), left.flatten(0, -3), right.flatten(0, -3), alpha=-1)
    return flat.view(x.shape)
