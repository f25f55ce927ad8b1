"""The rows of a batch one after the other without padding: their layout, the attention within each, and the cross entropy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from crosstune.recipes.latent_diffusion.torch_parts_plain import Segments
from crosstune.torch_engine.kernels import decoder
from crosstune.torch_engine.kernels.attention import attends_by_document, prefer_cudnn

_CHUNK = 16
"""Tokens that one program of a kernel computes, all of the same row."""


def pack_rows(lengths: NDArray[Any], latent_tokens: int) -> dict[str, NDArray[Any]]:
    """Return the arrays of `Packed` for texts of these lengths."""
    text, latent = _divide(lengths + latent_tokens), _divide(np.full_like(lengths, latent_tokens))
    places = np.arange(text["bounds"][-1])
    is_latent = places >= np.repeat(text["bounds"][1:], lengths + latent_tokens) - latent_tokens
    is_text = np.arange(lengths.max(initial=1)) < lengths[:, None]
    found: dict[str, NDArray[Any]] = {"text_sources": np.flatnonzero(is_text)}
    found |= {"text_places": np.flatnonzero(~is_latent), "latent_places": np.flatnonzero(is_latent)}
    found["is_latent"] = is_latent.astype(np.uint8)
    found |= {f"text_{name}": array for name, array in text.items()}
    return found | {f"latent_{name}": array for name, array in latent.items()}


def _divide(lengths: NDArray[Any]) -> dict[str, NDArray[np.int32]]:
    """Return the arrays of `Segments`."""
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    counts = -(-lengths // _CHUNK)
    row_chunks = np.concatenate([[0], np.cumsum(counts)])
    rows = np.repeat(np.arange(len(lengths)), counts)
    starts = bounds[rows] + _CHUNK * (np.arange(len(rows)) - row_chunks[rows])
    stops = np.minimum(starts + _CHUNK, bounds[rows + 1])
    arrays = {"bounds": bounds, "starts": starts, "stops": stops, "rows": rows, "row_chunks": row_chunks}
    return {name: array.astype(np.int32) for name, array in arrays.items()}


@dataclass(frozen=True)
class Packed:
    """The rows of a batch without padding."""

    text: Segments
    latent: Segments
    text_sources: torch.Tensor
    """The flat index of each text token in padded rows."""
    text_places: torch.Tensor
    """The place of each text token."""
    latent_places: torch.Tensor
    is_latent: torch.Tensor
    """Per token."""
    longest: int
    """Tokens of the longest row."""

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, torch.Tensor], *, longest: int) -> Packed:
        segments = {
            stream: Segments(
                *(arrays[f"{stream}_{name}"] for name in ("bounds", "starts", "stops", "rows", "row_chunks"))
            )
            for stream in ("text", "latent")
        }
        kept = {name: arrays[name] for name in ("text_sources", "text_places", "latent_places", "is_latent")}
        return cls(**segments, **kept, longest=longest)

    @property
    def num_rows(self) -> int:
        return len(self.text.bounds) - 1

    @property
    def are_equal(self) -> bool:
        return self.num_rows * self.longest == len(self.is_latent)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: Packed, heads: int) -> torch.Tensor:
    """Return the attention of each row over all its tokens."""
    parts = [part.unflatten(1, (heads, -1)) for part in (q, k, v)]
    if packed.are_equal:
        rows = [part.view(packed.num_rows, packed.longest, *part.shape[1:]).transpose(1, 2) for part in parts]
        with prefer_cudnn(q.device):
            found = functional.scaled_dot_product_attention(rows[0], rows[1], rows[2])
        return found.transpose(1, 2).reshape(q.shape)
    if attends_by_document(q.device, q.dtype, None):
        from torch.nn.attention.varlen import varlen_attn

        bounds, longest = packed.text.bounds, packed.longest
        found = varlen_attn(*parts, bounds, bounds, longest, longest)
        return found.reshape(q.shape)
    pieces = zip(
        *(part.transpose(0, 1).split(packed.text.bounds.diff().tolist(), 1) for part in parts), strict=True
    )
    rows = [functional.scaled_dot_product_attention(*(one[None] for one in piece))[0] for piece in pieces]
    return torch.cat(rows, dim=1).transpose(0, 1).reshape(q.shape)


class _CrossEntropy(torch.autograd.Function):
    """The cross entropy of each row. The logits become their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        operations = decoder.choose_operations(logits.device)
        losses, gradient = operations.cross_entropy(
            logits, targets, gradient=ctx.needs_input_grad[0], summed=False
        )
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        (logits,) = ctx.saved_tensors
        return logits.mul_(gradients[0][:, None]), None


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each row, in fp32. The logits are overwritten."""
    return _CrossEntropy.apply(logits, targets)
