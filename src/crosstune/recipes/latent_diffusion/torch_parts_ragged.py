"""Hold only the real tokens of a batch of rows of different lengths: everything but attention skips the padding.

Each function is a gather, and so is its gradient: nothing is added up in an order that depends on the device's timing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Layout(NamedTuple):
    """Say where the tokens of a flat list are in rows that are padded to one width, and where those are in the list."""

    row: torch.Tensor
    """(tokens,): the row of each token."""
    place: torch.Tensor
    """(tokens,): its place among all of the padded rows, which are counted on."""
    token: torch.Tensor
    """(rows, width): the token of each place; any token at a place that is padding."""
    real: torch.Tensor
    """(rows, width): whether a place is no padding."""


def make_layout(row: torch.Tensor, place: torch.Tensor, lengths: torch.Tensor, *, width: int) -> Layout:
    """Return the layout of rows of these lengths, whose tokens follow each other in the list."""
    columns = torch.arange(width, device=lengths.device)
    first = lengths.cumsum(0) - lengths
    token = (first[:, None] + columns).clamp(max=row.shape[0] - 1)
    return Layout(row, place, token, columns < lengths[:, None])


def to_rows(tokens: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return (tokens, columns) as (rows, width, columns), with zeros for padding."""
    found: torch.Tensor = _ToRows.apply(tokens, *layout)
    return found


def to_tokens(padded: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return (rows, width, columns) as (tokens, columns)."""
    found: torch.Tensor = _ToTokens.apply(padded, *layout)
    return found


def for_tokens(per_row: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return (rows, columns) as (tokens, columns): each token has what its row has."""
    found: torch.Tensor = _ForTokens.apply(per_row, *layout)
    return found


def _pad(tokens: torch.Tensor, token: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    return torch.where(real[..., None], tokens[token], 0.0)


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, *layout: torch.Tensor) -> torch.Tensor:
        _, place, token, real = layout
        ctx.save_for_backward(place)
        return _pad(tokens, token, real)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (place,) = ctx.saved_tensors
        return grads[0].flatten(0, 1).index_select(0, place), None, None, None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, *layout: torch.Tensor) -> torch.Tensor:
        _, place, token, real = layout
        ctx.save_for_backward(token, real)
        return padded.flatten(0, 1).index_select(0, place)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        token, real = ctx.saved_tensors
        return _pad(grads[0], token, real), None, None, None, None


class _ForTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, per_row: torch.Tensor, *layout: torch.Tensor) -> torch.Tensor:
        row, _, token, real = layout
        ctx.save_for_backward(token, real)
        return per_row.index_select(0, row)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        token, real = ctx.saved_tensors
        return _pad(grads[0], token, real).sum(1), None, None, None, None
