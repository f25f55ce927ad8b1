"""Generate with the fast layers and a static cache: the token at position p is in column p."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from crosstune.torch_engine.generate.sampler import Block, pad_columns
from crosstune.torch_engine.kernels import torch_operations
from crosstune.torch_engine.kernels.attention import Documents, attend, prefer_cudnn
from crosstune.torch_engine.kernels.choose_layers import why_general
from crosstune.torch_engine.kernels.decoder import FastDecoder
from crosstune.torch_engine.kernels.frozen_weights import QuantizedWeights, has_own_kernel, is_dense
from crosstune.torch_engine.kernels.halves import AttentionHalf
from crosstune.torch_engine.kernels.operations import has_triton
from crosstune.torch_engine.loading.adapters import AdaptedLinear

COPIED_SHARE = 0.25
"""The fraction of free memory for copies of the weights of a trained model, while it generates."""
FEWEST_FOR_COPIES = 32
"""Minimum number of new tokens for copies, which cost the time of several steps."""


def why_no_fast_rows(model: Any, adapters: Mapping[str, Any], device: torch.device) -> str | None:
    """Return why the fast layers cannot generate with a frozen model and these adapters; None if they can."""
    if reason := why_general(model):
        return reason
    if any(type(each) is not AdaptedLinear or ".layers." not in name for name, each in adapters.items()):
        return "the fast layers support LoRA on the layers alone"
    if device.type != "cpu" and not (device.type == "cuda" and has_triton()):
        return "their kernels need a GPU with Triton"
    return None


def longest_for_rope(config: Any) -> float:
    """Return the longest row for which the rotary frequencies do not depend on its length."""
    ropes = getattr(config, "rope_parameters", None) or {}
    by_kind = [each for each in ropes.values() if isinstance(each, dict)] or [ropes]
    changing = [each for each in by_kind if each.get("rope_type") in ("dynamic", "longrope")]
    return min(
        (each.get("original_max_position_embeddings") or config.max_position_embeddings for each in changing),
        default=math.inf,
    )


def layer_bytes(model: Any, dtype: torch.dtype) -> int:
    """Return the bytes of copies of the dense weights of the layers."""
    layers = [module for module in model.model.layers.modules() if is_dense(module)]
    return sum(layer.weight.numel() for layer in layers) * dtype.itemsize


class FastRows:
    """Decode one token of every row at a time. On a GPU, `step` neither waits for the host nor allocates outside of the pool
    of a CUDA graph."""

    def __init__(self, decoder: FastDecoder) -> None:
        self.decoder, self.device = decoder, decoder.device
        self.by_kernel = decoder.operations is not torch_operations
        decoder.publish()
        self._head = decoder.head()
        self.vocabulary = self._head.shape[0]
        self.columns = 0
        self._lengths: list[int] = []
        """Tokens in each row's cache; 0 for a released row."""

    @property
    def column_bytes(self) -> int:
        """Bytes of a token in the cache."""
        heads = [half.heads for half, _ in self.decoder.layers]
        return sum(2 * each.num_keys * each.size for each in heads) * self.decoder.dtype.itemsize

    @property
    def allows_graph(self) -> bool:
        """True if the step can be captured as a CUDA graph: on CUDA, with our kernels, and without a weight that is dequantized by
        a library that may wait for the device."""
        return (
            self.by_kernel
            and self.device.type == "cuda"
            and torch.version.hip is None
            and all(
                is_dense(base) or base.stored.quantizer == "fp8" or has_own_kernel(base, self.device)
                for group in self.decoder.groups().values()
                if not (isinstance(group.weights, QuantizedWeights) and group.weights.is_kept)
                for base in group.bases
            )
        )

    def allocate(self, num_rows: int, columns: int, most_columns: int) -> None:
        """Make a cache; it grows if answers need more columns. No row needs more than `most_columns`."""
        self._most_columns = most_columns
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for half, _ in self.decoder.layers:
            size = (num_rows, columns, half.heads.num_keys, half.heads.size)
            for cache in (self.keys, self.values):  # masked columns must be finite
                cache.append(torch.zeros(size, dtype=self.decoder.dtype, device=self.device))
        self.positions = torch.zeros(num_rows, dtype=torch.long, device=self.device)
        self._numbers = torch.arange(num_rows, device=self.device)
        self._lengths = [0] * num_rows
        self._set_columns(columns)

    def fill(self, prompts: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Compute each prompt once, write it to all of its rows, and return the logits after it. Prompts are padded on the right,
        where causal attention does not look."""
        self._reserve(max(map(len, prompts)))
        ids = pad_columns(prompts, on_left=False).to(self.device)
        count, length = ids.shape
        targets = torch.tensor([row for each in rows for row in each], device=self.device)
        sources = torch.tensor([n for n, each in enumerate(rows) for _ in each], device=self.device)
        documents = Documents(count, length)

        def attend_prompts(index: int, half: AttentionHalf, *parts: torch.Tensor) -> torch.Tensor:
            q, k, v = parts
            self.keys[index][targets, :length] = k[sources]
            self.values[index][targets, :length] = v[sources]
            return attend(q, k, v, documents=documents, scale=half.scale, window=half.window)

        ends = [number * length + len(prompt) - 1 for number, prompt in enumerate(prompts)]
        tables = {kind: (cos[:length], sin[:length]) for kind, (cos, sin) in self._tables.items()}
        with prefer_cudnn(self.device):
            hidden = self.decoder.hidden_with_cache(
                ids, tables=tables, attend=attend_prompts, rows=torch.tensor(ends, device=self.device)
            )
        self._set_lengths(
            [row for each in rows for row in each],
            [len(prompt) for prompt, each in zip(prompts, rows, strict=True) for _ in each],
        )
        return hidden.to(self.decoder.dtype) @ self._head.t()

    def save(self, row: int, length: int) -> Block:
        """Return a copy of the prompt that `fill` has just written to a row."""
        return [(k[row, :length].clone(), v[row, :length].clone()) for k, v in self._layers()]

    def load(self, block: Block, rows: Sequence[int]) -> None:
        """Write a saved prompt to rows."""
        length = len(block[0][0])
        for (keys, values), (k, v) in zip(self._layers(), block, strict=True):
            for row in rows:
                keys[row, :length], values[row, :length] = k, v
        self._set_lengths(rows, [length] * len(rows))

    def release(self, row: int) -> None:
        """Mark the end of a row's answer; its cache may be overwritten."""
        self._lengths[row] = 0

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        chosen = torch.tensor(rows, device=self.device)
        for index in range(len(self.keys)):
            self.keys[index], self.values[index] = self.keys[index][chosen], self.values[index][chosen]
        self.positions, self._numbers = self.positions[chosen], self._numbers[: len(rows)]
        self._lengths = [self._lengths[row] for row in rows]

    def advance(self) -> bool:
        """Make room for a token in every row; return True if the cache moved in memory."""
        self._lengths = [length + (length > 0) for length in self._lengths]
        return self._reserve(max(self._lengths))

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append a token to every row, and return the logits after it."""
        self._masks: dict[int | None, torch.Tensor | None] = {}
        self.positions.clamp_(max=self.columns - 1)  # finished rows still count
        tables = {
            kind: (cos[self.positions], sin[self.positions]) for kind, (cos, sin) in self._tables.items()
        }
        hidden = self.decoder.hidden_with_cache(tokens[:, None], tables=tables, attend=self._attend)
        self.positions.add_(1)
        return hidden.to(self.decoder.dtype) @ self._head.t()

    def _attend(self, index: int, half: AttentionHalf, *parts: torch.Tensor) -> torch.Tensor:
        q, k, v = (part[:, 0] for part in parts)
        keys, values = self.keys[index], self.values[index]
        if self.by_kernel:
            from crosstune.torch_engine.kernels.triton_cache import attend_cached, store

            store(k, v, keys, values, self.positions)
            options: dict[str, Any] = {"scale": half.scale, "window": half.window}
            return attend_cached(q, keys, values, self.positions, **options)[:, None]
        keys[self._numbers, self.positions] = k
        values[self._numbers, self.positions] = v
        used = max(self._lengths)
        found = F.scaled_dot_product_attention(
            q.reshape(len(q), keys.shape[2], -1, q.shape[2]),  # queries that share a key are one head
            keys[:, :used].transpose(1, 2),
            values[:, :used].transpose(1, 2),
            attn_mask=self._mask(half.window, used),
            scale=half.scale,
        )
        return found.reshape(len(q), 1, -1, q.shape[2])

    def _mask(self, window: int | None, used: int) -> torch.Tensor | None:
        """Return the columns that each row sees, once per step; None if it is all of them."""
        if window is not None and window >= used:
            window = None
        if window not in self._masks:
            columns = torch.arange(used, device=self.device)
            seen = columns <= self.positions[:, None]
            if window is not None:
                seen &= columns > self.positions[:, None] - window
            whole = window is None and min(self._lengths) == used
            self._masks[window] = None if whole else seen[:, None, None]
        return self._masks[window]

    def _layers(self) -> zip[tuple[torch.Tensor, torch.Tensor]]:
        return zip(self.keys, self.values, strict=True)

    def _set_lengths(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            self._lengths[row] = length
        self.positions[torch.tensor(rows, device=self.device)] = torch.tensor(lengths, device=self.device)

    def _reserve(self, needed: int) -> bool:
        if needed <= self.columns:
            return False
        columns = max(needed, min(self.columns + self.columns // 2, self._most_columns))
        for cache in (self.keys, self.values):
            for index, old in enumerate(cache):
                cache[index] = old.new_zeros(old.shape[0], columns, *old.shape[2:])
                cache[index][:, : self.columns] = old
        self._set_columns(columns)
        return True

    def _set_columns(self, columns: int) -> None:
        self.columns, self._tables = columns, self.decoder.tables(None, columns)
