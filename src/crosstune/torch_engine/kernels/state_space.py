"""The scan of Mamba-2 layers (Granite 4, Nemotron-H, Falcon-H1, Bamba, Zamba2), in chunks, in plain torch.

Some versions of transformers compute it with tensors of chunk x chunk x heads x state numbers for each chunk, which is
tens of gigabytes for a few thousand tokens. Here each contraction is one matmul, and the heads of a group share its B and C.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from crosstune.torch_engine.kernels.chunks import cut, multiply

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
    """Return the output, rows x tokens x heads x size, in fp32, and the last states if asked.

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
