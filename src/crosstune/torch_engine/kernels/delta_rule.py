"""The gated delta rule of linear attention (Qwen3.5, Qwen3-Next, OLMo Hybrid), in chunks, in plain torch.

A chunk changes the state S to decay * S + K^T (U - W S), which is linear in S. transformers computes the parenthesis in turn
with the states; here each chunk's matrix of that map is computed first, for all chunks at once, so that one matmul per chunk
is left to do in turn.
"""

from __future__ import annotations

import inspect
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

    Queries, keys and values are rows x tokens x heads x size; `g` is the logarithm of each token's decay, and `beta` its
    share of the old value to replace.
    """
    assert cu_seqlens is None, "packed rows are computed document by document"
    dtype, length = query.dtype, query.shape[1]
    query, key, value, beta, g = (x.transpose(1, 2).float() for x in (query, key, value, beta, g))
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _SMALL) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    fill = -length % chunk_size
    query, key, value = (
        F.pad(x, (0, 0, 0, fill)).unflatten(2, (-1, chunk_size)) for x in (query, key, value)
    )
    beta, g = (F.pad(x, (0, fill)).unflatten(2, (-1, chunk_size)) for x in (beta, g))

    decay = g.cumsum(-1)
    upper = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=query.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(upper, -torch.inf).exp()
    decayed, rest = decay.exp()[..., None], (decay[..., -1:] - decay).exp()[..., None]

    changed = key * beta[..., None]
    system = changed @ key.transpose(-1, -2) * between
    sides = torch.cat([value * beta[..., None], changed * decayed], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    new, read = solved.split([value.shape[-1], key.shape[-1]], dim=-1)

    written = (key * rest).transpose(-1, -2)
    whole = torch.diag_embed(decayed[..., -1, :].expand(*decayed.shape[:-2], key.shape[-1]))
    maps, added = whole - written @ read, written @ new
    state = torch.zeros_like(added[:, :, 0]) if initial_state is None else initial_state.float()
    states = [state]
    for step, more in zip(maps.unbind(2), added.unbind(2), strict=True):
        states.append(step @ states[-1] + more)
    before = torch.stack(states[:-1], dim=2)
    inside = query @ key.transpose(-1, -2) * between
    out = (query * decayed) @ before + inside @ (new - read @ before)
    out = out.flatten(2, 3)[:, :, :length].transpose(1, 2).to(dtype)
    return out.contiguous(), states[-1] if output_final_state else None


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
