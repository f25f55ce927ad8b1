"""The operations of fused blocks in plain torch, for any device: modulated norms, norms of heads, and gelu."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

EPS = 1e-5
"""Of the layer norms, as in `functional.layer_norm`."""
HEAD_EPS = torch.finfo(torch.float32).eps
"""Of the norms of queries and keys, as in `functional.rms_norm`."""

HeadNorms = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Weights of the norms of queries and keys of the text, and of queries and keys of the latent."""


@dataclass(frozen=True)
class Segments:
    """Rows of tokens, one after the other, and their division into chunks that one program of a kernel computes."""

    bounds: torch.Tensor
    """The first token of each row, followed by the number of tokens."""
    starts: torch.Tensor
    """The first token of each chunk."""
    stops: torch.Tensor
    rows: torch.Tensor
    """The row of each chunk."""
    row_chunks: torch.Tensor
    """The first chunk of each row, followed by the number of chunks."""

    def repeat(self, per_row: torch.Tensor) -> torch.Tensor:
        """Return a value per row as a value per token."""
        return per_row.repeat_interleave(self.bounds.diff().long(), dim=0)

    def sum(self, per_token: torch.Tensor) -> torch.Tensor:
        """Return the sum over the tokens of each row."""
        return torch.stack([part.sum(0) for part in per_token.split(self.bounds.diff().tolist())])


def modulate(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    gate: torch.Tensor | None,
    shift: torch.Tensor,
    scale: torch.Tensor,
    segments: Segments,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x + gate * branch, its layer norm with the shift and scale of each row, and the mean and 1 / standard deviation
    of each token."""
    total = x
    if branch is not None and gate is not None:
        total = (x.float() + segments.repeat(gate).float() * branch.float()).to(x.dtype)
    values = total.float()
    mean = values.mean(-1)
    rstd = torch.rsqrt(values.var(-1, correction=0) + EPS)
    normal = (values - mean[:, None]) * rstd[:, None]
    found = normal * (1 + segments.repeat(scale).float()) + segments.repeat(shift).float()
    return total, found.to(x.dtype), mean, rstd


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
    """Return the gradients of x and of the branch; and for each row the gradients of shift, scale and gate and the sum of the
    branch's gradient. `residual` is the gradient of the sum that `modulate` returned."""
    given = gradient.float()
    normal = (total.float() - mean[:, None]) * rstd[:, None]
    sums = [given, given * normal]
    given = given * (1 + segments.repeat(scale).float())
    found = given - given.mean(-1, keepdim=True) - normal * (given * normal).mean(-1, keepdim=True)
    found = found * rstd[:, None]
    if residual is not None:
        found = found + residual.float()
    for_branch = None
    if branch is not None and gate is not None:
        for_branch = found * segments.repeat(gate).float()
        sums += [found * branch.float(), for_branch]
        for_branch = for_branch.to(branch.dtype)
    by_row = given.new_empty(len(segments.bounds) - 1, 4, given.shape[1])
    for index, part in enumerate(sums):
        by_row[:, index] = segments.sum(part)
    return found.to(total.dtype), for_branch, by_row


def normalize_heads(
    qkv: torch.Tensor, norms: HeadNorms, is_latent: torch.Tensor, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the queries and keys of packed rows after the norm of each head."""
    found = []
    for part, text, latent in zip(qkv.chunk(3, -1)[:2], norms[:2], norms[2:], strict=True):
        values = part.float().unflatten(-1, (heads, -1))
        gain = torch.where(is_latent[:, None] != 0, latent.float(), text.float())[:, None]
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + HEAD_EPS) * gain
        found.append(values.flatten(1).to(qkv.dtype))
    return found[0], found[1]


def normalize_heads_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qkv: torch.Tensor,
    norms: HeadNorms,
    is_latent: torch.Tensor,
    heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of the packed rows, given the gradients after the norms; the gradients of the norms' weights, in
    the order of `norms`; and the sum of the packed rows' gradients over the text tokens."""
    latent_tokens = is_latent[:, None] != 0
    found: list[torch.Tensor] = []
    sums: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for gradient, part, text, latent in zip((q, k), qkv.chunk(3, -1)[:2], norms[:2], norms[2:], strict=True):
        values, given = (each.float().unflatten(-1, (heads, -1)) for each in (part, gradient))
        inverse = torch.rsqrt(values.square().mean(-1, keepdim=True) + HEAD_EPS)
        values = values * inverse
        products = (given * values).sum(1)
        sums[0].append((products * ~latent_tokens).sum(0))
        sums[1].append((products * latent_tokens).sum(0))
        given = given * torch.where(latent_tokens, latent.float(), text.float())[:, None]
        given = (given - values * (given * values).mean(-1, keepdim=True)) * inverse
        found.append(given.flatten(1))
    whole = torch.cat([*found, v.float()], dim=-1)
    return whole.to(qkv.dtype), torch.stack(sums[0] + sums[1]), (whole * ~latent_tokens).sum(0)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def gelu_backward(gradient: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return gelu of x, the gradient of x, and the column sums of that gradient."""
    found = torch.ops.aten.gelu_backward(gradient, x, approximate="tanh")
    return gelu(x), found, found.float().sum(0)
