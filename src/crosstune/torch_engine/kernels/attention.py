"""Attention within rows or documents, with the device's fastest kernel."""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from crosstune.estimate.fast_layers import LONGEST_KEPT_ROW, attends_by_products
from crosstune.torch_engine.kernels.short_rows import attend_short_rows


@dataclass(frozen=True)
class Forks:
    """Answers that share prompts, as in `ForkedBatch`: as masks, or as sequences of queries and keys."""

    segments: torch.Tensor | None = None
    branches: torch.Tensor | None = None
    key_bounds: torch.Tensor | None = None
    """The first key of each sequence, followed by the number of keys; the queries have the bounds of the documents."""
    keys: torch.Tensor | None = None
    """The token of each key."""
    longest: int = 0
    """The most keys of a sequence."""

    def mask(self, positions: torch.Tensor, window: int | None) -> torch.Tensor:
        """Return the keys that each query may attend to, rows x length x length, apart from causality."""
        assert self.segments is not None and self.branches is not None
        of_key = self.branches[:, None, :]
        seen = (self.segments[:, :, None] == self.segments[:, None, :]) & (
            (of_key == 0) | (of_key == self.branches[:, :, None])
        )
        if window is not None:
            seen = seen & (positions[:, :, None] - positions[:, None, :] < window)
        return seen


@dataclass
class Documents:
    """The documents of a batch: a token attends to earlier tokens of its document, within a window if there is one."""

    num_rows: int
    length: int
    positions: torch.Tensor | None = None
    """Rows x length, restarting at every document; None if each row is one document."""
    bounds: torch.Tensor | None = None
    """The first token of each document, counted over all rows, followed by the number of tokens, in int32."""
    forks: Forks | None = None
    """Set if the documents are answers that share prompts."""
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def needs_mask(self, window: int | None) -> bool:
        return self.positions is not None or (window is not None and window < self.length)

    def mask(self, window: int | None, device: torch.device) -> torch.Tensor:
        """Return the keys that each query attends to. Built once per batch."""
        if window not in self._masks:
            places = torch.arange(self.length, device=device)
            behind = places[:, None] - places[None, :]
            seen = behind >= 0
            if window is not None and self.forks is None:
                seen = seen & (behind < window)
            seen = seen[None]
            if self.forks is not None:
                assert self.positions is not None
                seen = seen & self.forks.mask(self.positions, window)
            elif self.positions is not None:
                ids = (self.positions.diff(dim=1, prepend=self.positions[:, :1] - 1) != 1).cumsum(1)
                seen = seen & (ids[:, :, None] == ids[:, None, :])
            self._masks[window] = seen[:, None]
        return self._masks[window]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    documents: Documents,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Return causal attention over queries, keys and values of rows x length x heads x size, in that layout."""
    if attends_by_products(documents.length, on_gpu=q.device.type != "cpu") and multiplies_in_batches(
        q.dtype
    ):
        mask = documents.mask(window, q.device) if documents.needs_mask(window) else None
        keep = documents.length <= LONGEST_KEPT_ROW
        window = window if documents.forks is None else None  # distances in a fork are in the mask
        return attend_short_rows(q, k, v, mask=mask, window=window, scale=scale, keep=keep)
    if not documents.needs_mask(window):
        return _rows(q, k, v, None, scale)
    if attends_by_document(q.device, q.dtype, window):
        return _varlen(q, k, v, documents, scale, window)
    return _rows(q, k, v, documents.mask(window, q.device), scale)


def multiplies_in_batches(dtype: torch.dtype) -> bool:
    """Return True if this CPU has fast batched matmuls in a dtype."""
    if dtype.itemsize > 2:
        return True
    has_mkldnn = dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()
    return has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def attends_by_document(device: torch.device, dtype: torch.dtype, window: int | None) -> bool:
    """Return True if the device has a kernel for rows of documents without a mask."""
    has_kernel = "window_size" in _varlen_options() or ("is_causal" in _varlen_options() and window is None)
    return device.type == "cuda" and dtype.itemsize == 2 and has_kernel


def prefer_cudnn(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Prefer cuDNN's attention in the `with` block: on Hopper it is the fastest for equal rows."""
    if device.type != "cuda" or torch.version.hip is not None:
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    return sdpa_kernel(order, set_priority=True)


def _rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    if mask is not None and q.device.type == "cuda":
        k, v = _repeat(q, k), _repeat(q, v)  # torch's kernels with a mask do not support shared keys
    found = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return found.transpose(1, 2)


def _repeat(q: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    times = q.shape[2] // shared.shape[2]
    return shared if times == 1 else shared.repeat_interleave(times, dim=2)


@lru_cache(maxsize=1)
def _varlen_options() -> frozenset[str]:
    """Return the parameters of torch's attention over documents; empty if this torch does not have it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def _varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    names, length, bounds = _varlen_options(), documents.length, documents.bounds
    if bounds is None:  # each row is a document, with a window
        stop = (documents.num_rows + 1) * length
        bounds = torch.arange(0, stop, length, dtype=torch.int32, device=q.device)
    options: dict[str, Any] = {"is_causal": True}
    if "window_size" in names:
        options = {"window_size": (-1 if window is None else window - 1, 0)}
    if "scale" in names:
        options["scale"] = scale
    else:
        q = q * (scale * q.shape[-1] ** 0.5)
    if "enable_gqa" in names:
        options["enable_gqa"] = q.shape[2] != k.shape[2]
    else:
        k, v = _repeat(q, k), _repeat(q, v)
    flat = [part.reshape(-1, *part.shape[2:]) for part in (q, k, v)]
    key_bounds, longest = bounds, length
    if documents.forks is not None:  # a branch is a sequence whose queries are aligned with its last keys
        forks = documents.forks
        assert forks.keys is not None and forks.key_bounds is not None
        key_bounds, longest = forks.key_bounds, forks.longest
        flat[1:] = [part.index_select(0, forks.keys) for part in flat[1:]]
    found: Any = varlen_attn(*flat, bounds, key_bounds, min(length, longest), longest, **options)
    return found.view(q.shape)
