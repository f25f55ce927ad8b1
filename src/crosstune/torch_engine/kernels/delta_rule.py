"""The gated delta rule of linear attention (Qwen3.5, Qwen3-Next, OLMo Hybrid), in chunks, in plain torch.

A chunk changes the state S to decay * S + K^T (U - W S), which is linear in S. transformers computes the parenthesis in turn
with the states; here each chunk's matrix -K^T W is computed first, for all chunks at once, so that one matmul per chunk is
left to do in turn.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

_THEIRS = "torch_chunk_gated_delta_rule"
"""transformers' function; without it, a layer has a kernel of flash-linear-attention."""
_LAYERS_OWN = "chunk_gated_delta_rule"
"""The attribute of layers in versions of transformers that call it through the layer."""
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
        query, key, value, g, beta = (_cut(x, chunk_size) for x in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _SMALL) for x in (query, key))
        query = query * query.shape[-1] ** -0.5
        query, key = query.unsqueeze(2), key.unsqueeze(2)
        value, g, beta = (x.unflatten(1, (num_heads, -1)) for x in (value, g, beta))

        decay = g.cumsum(-1)
        upper = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=query.device).triu(1)
        between = (decay[..., :, None] - decay[..., None, :]).masked_fill(upper, -torch.inf).exp()
        decayed, rest = decay.exp(), (decay[..., -1:] - decay).exp()

        def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            product: torch.Tensor = _Product.apply(left, right, is_rounded)
            return product

        turned = key.transpose(-1, -2)
        inverse = _Inverse.apply(multiply(key, turned) * (between * beta[..., None]), is_rounded)
        new = multiply(inverse, value * beta[..., None])
        read = multiply(inverse, key * (beta * decayed)[..., None])
        written = (key * rest[..., None]).transpose(-1, -2)
        before, last = _States.apply(
            multiply(written, read),
            multiply(written, new),
            decayed[..., -1],
            None if initial_state is None else initial_state.float().unflatten(1, (num_heads, -1)),
            is_rounded,
        )
        inside = multiply(query, turned) * between
        seen = query * decayed[..., None] - multiply(inside, read)
        out = multiply(seen, before) + multiply(inside, new)
    out = out.flatten(1, 2).flatten(2, 3)[:, :, :length].transpose(1, 2)
    out = out.to(dtype, memory_format=torch.contiguous_format)
    return out, last.flatten(1, 2) if output_final_state else None


def _cut(x: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """Return rows x heads x chunks x tokens of a chunk, in fp32; zeros fill the last chunk."""
    fill = -x.shape[1] % chunk_size
    if fill:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, fill))
    cut = x.unflatten(1, (-1, chunk_size)).movedim(3, 1)
    return cut.to(torch.float32, memory_format=torch.contiguous_format)


@contextlib.contextmanager
def _tensor_cores(is_rounded: bool) -> Iterator[None]:
    """Multiply in TF32 if the inputs of the layer have 16 bits: it has more bits than bf16 and as many as fp16."""
    settings: Any = torch.backends.cuda.matmul
    name, value = ("fp32_precision", "tf32") if hasattr(settings, "fp32_precision") else ("allow_tf32", True)
    earlier = getattr(settings, name)
    if is_rounded:
        setattr(settings, name, value)
    try:
        yield
    finally:
        setattr(settings, name, earlier)


class _Product(torch.autograd.Function):
    """A matmul, forward and backward with tensor cores if its inputs are rounded anyway."""

    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor, is_rounded: bool) -> torch.Tensor:
        ctx.save_for_backward(left, right)
        ctx.is_rounded = is_rounded
        with _tensor_cores(is_rounded):
            return left @ right

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        left, right = ctx.saved_tensors
        with _tensor_cores(ctx.is_rounded):
            return gradients[0] @ right.transpose(-1, -2), left.transpose(-1, -2) @ gradients[0], None


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
        with _tensor_cores(ctx.is_rounded):
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
        with _tensor_cores(is_rounded):
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
        with _tensor_cores(ctx.is_rounded):
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


def use_delta_rule(model: nn.Module) -> None:
    """Make the layers that call transformers' function in plain torch call ours."""
    for module in model.modules():
        own = getattr(module, _LAYERS_OWN, None)
        if own is not None and getattr(own, "__name__", "") == _THEIRS:
            setattr(module, _LAYERS_OWN, chunk_gated_delta_rule)
            continue
        forward = inspect.unwrap(type(module).forward)
        if _THEIRS in getattr(forward, "__code__", chunk_gated_delta_rule.__code__).co_names:
            theirs = forward.__globals__[_THEIRS]
            names = inspect.getclosurevars(theirs).nonlocals
            if not names.get("is_new_implementation", False):
                module.forward = MethodType(_with_global(forward, _THEIRS, chunk_gated_delta_rule), module)


def _with_global(function: Any, name: str, value: Any) -> FunctionType:
    """Return a function that reads another value of one global name. The module of the function is not changed."""
    found = FunctionType(
        function.__code__,
        {**function.__globals__, name: value},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    found.__kwdefaults__ = function.__kwdefaults__
    return found
