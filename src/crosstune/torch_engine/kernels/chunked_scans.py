"""Replace transformers' recurrences in plain torch with faster ones, in chunks of tokens: the gated delta rule and Mamba-2's scan."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


def cut(x: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """Return rows x heads x chunks x tokens of a chunk, in fp32; zeros fill the last chunk."""
    fill = -x.shape[1] % chunk_size
    if fill:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, fill))
    cut = x.unflatten(1, (-1, chunk_size)).movedim(3, 1)
    return cut.to(torch.float32, memory_format=torch.contiguous_format)


@contextlib.contextmanager
def tensor_cores(is_rounded: bool) -> Iterator[None]:
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


class Product(torch.autograd.Function):
    """A matmul, forward and backward with tensor cores if its inputs are rounded anyway."""

    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor, is_rounded: bool) -> torch.Tensor:
        ctx.save_for_backward(left, right)
        ctx.is_rounded = is_rounded
        with tensor_cores(is_rounded):
            return left @ right

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        left, right = ctx.saved_tensors
        with tensor_cores(ctx.is_rounded):
            return gradients[0] @ right.transpose(-1, -2), left.transpose(-1, -2) @ gradients[0], None


def multiply(left: torch.Tensor, right: torch.Tensor, *, is_rounded: bool) -> torch.Tensor:
    product: torch.Tensor = Product.apply(left, right, is_rounded)
    return product


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
    """Compute the gated delta rule of linear attention (Qwen3.5, Qwen3-Next, OLMo Hybrid). Return the output, rows x tokens x heads x
    size, and the last state if asked; in fp32 inside.

    A chunk changes the state S to decay * S + K^T (U - W S), which is linear in S. transformers computes the parenthesis in turn
    with the states; here each chunk's matrix -K^T W is computed first, for all chunks at once, so that one matmul per chunk is
    left to do in turn.

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


_CHUNK = 64
"""Tokens: the result does not depend on it, and memory is least between the sizes of a head and of its state."""


def chunk_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    chunk_size: int = _CHUNK,
    D: torch.Tensor | None = None,  # noqa: N803
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    seq_idx: torch.Tensor | None = None,
    **_: Any,
) -> Any:
    """Compute the scan of Mamba-2 layers (Granite 4, Nemotron-H, Falcon-H1, Bamba, Zamba2). Return the output, rows x tokens x heads x
    size, in fp32, and the last states if asked.

    Some versions of transformers compute it with tensors of chunk x chunk x heads x state numbers for each chunk, which is
    tens of gigabytes for a few thousand tokens. Here each contraction is one matmul, and the heads of a group share its B and C.
    The state of a head, size x state, decays by exp(A dt) and takes dt x B^T; a token reads C of it, and D x.
    """
    assert z is None and seq_idx is None, "packed rows are computed document by document"
    (num_rows, length, num_heads, size), num_groups = hidden_states.shape, B.shape[2]
    is_rounded = hidden_states.dtype != torch.float32
    product = functools.partial(multiply, is_rounded=is_rounded)
    with torch.autocast(hidden_states.device.type, enabled=False):
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit).float()
        hidden_states = hidden_states.float()
        # rows x groups x chunks x tokens x state; x heads of a group x size; and rows x groups x heads x chunks x tokens.
        read, write = cut(C, _CHUNK), cut(B, _CHUNK)
        values = (hidden_states * dt[..., None]).reshape(num_rows, length, num_groups, -1)
        values = cut(values, _CHUNK)
        decay = cut(dt * A.float(), _CHUNK).unflatten(1, (num_groups, -1)).cumsum(-1)

        upper = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=dt.device).triu(1)
        between = (decay[..., :, None] - decay[..., None, :]).masked_fill(upper, -torch.inf).exp()
        scores = product(read, write.transpose(-1, -2)).unsqueeze(2) * between
        inside = product(scores, _by_head(values, size)).permute(0, 3, 4, 1, 2, 5)

        rest = (decay[..., -1:] - decay).exp()
        added = product(write.transpose(-1, -2), _scale(values, rest))
        keep = decay[..., -1:].exp().movedim(2, -1).repeat_interleave(size, dim=-1)
        state = torch.zeros_like(added[:, :, 0])
        if initial_states is not None:
            state = initial_states.float().unflatten(1, (num_groups, -1)).flatten(2, 3).transpose(-1, -2)
        states = []
        for more, kept in zip(added.unbind(2), keep.unbind(2), strict=True):
            states.append(state)
            state = torch.addcmul(more, state, kept)
        before = product(read, torch.stack(states, dim=2))
        before = _scale(before, decay.exp()).unflatten(-1, (-1, size)).permute(0, 2, 3, 1, 4, 5)
        out = (inside + before).reshape(num_rows, -1, num_heads, size)[:, :length]
        if D is not None:
            out = out + D[..., None] * hidden_states
        out = out.contiguous()  # layers take views of it
    if not return_final_states:
        return out
    return out, state.transpose(-1, -2).unflatten(2, (-1, size)).flatten(1, 2)


def _by_head(values: torch.Tensor, size: int) -> torch.Tensor:
    """Return rows x groups x heads x chunks x tokens x size."""
    return values.unflatten(-1, (-1, size)).movedim(-2, 2)


def _scale(values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Multiply the values of each head with factors of rows x groups x heads x chunks x tokens."""
    heads = values.unflatten(-1, (factors.shape[2], -1))
    return (heads * factors.movedim(2, -1).unsqueeze(-1)).flatten(-2)


_OURS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "mamba2_chunk_scan": chunk_scan,
}
"""By the names of transformers' functions. They run kernels where flash-linear-attention or mamba-ssm are installed, and are
then kept."""
_LAYERS_OWN = "chunk_gated_delta_rule"
"""The attribute of layers in versions of transformers that call a function through the layer."""


def use_chunked_scans(model: nn.Module) -> None:
    """Make the layers that call transformers' functions in plain torch call ours."""
    for module in model.modules():
        ours = _OURS.get(getattr(getattr(module, _LAYERS_OWN, None), "__name__", ""))
        if ours is not None:
            setattr(module, _LAYERS_OWN, ours)
            continue
        forward = inspect.unwrap(type(module).forward)
        names = getattr(getattr(forward, "__code__", None), "co_names", ())
        for name in _OURS.keys() & set(names):
            theirs = inspect.getclosurevars(forward.__globals__[name]).nonlocals
            if not theirs.get("is_new_implementation", False):
                module.forward = MethodType(_with_global(forward, name, _OURS[name]), module)


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
