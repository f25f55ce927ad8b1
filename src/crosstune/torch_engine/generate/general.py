"""Rows of any model of transformers whose cache has only keys and values.

All rows append at the same column, so they start at different columns: the mask hides the columns before, as with left
padding.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from crosstune.torch_engine.device import Precision
from crosstune.torch_engine.generate.sampler import Block, pad_columns
from crosstune.torch_engine.loading.adapters import AdaptedLinear


def has_plain_cache(model: Any) -> bool:
    """Return True if the model's cache has only keys and values: no recurrent states, and no encoder."""
    if getattr(model.config, "is_encoder_decoder", False) or getattr(model, "_is_stateful", False):
        return False
    if not model._supports_default_dynamic_cache() or "past_key_values" not in _parameters(model):
        return False
    layers = DynamicCache(config=model.config).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


class _Columns:
    """The columns in use, the same for all layers."""

    def __init__(self) -> None:
        self.start = self.end = self.room = 0


class _Layer(CacheLayerMixin):
    """The keys and values of a layer, rows x heads x columns x size, in a buffer that grows.

    It has every column of a sliding window too, which the model's mask limits.
    """

    is_sliding = False

    def __init__(self, columns: _Columns) -> None:
        super().__init__()
        self.columns = columns

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        self.keys, self.values = (
            states.new_zeros(*states.shape[:2], self.columns.room, states.shape[3])
            for states in (key_states, value_states)
        )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.columns.start, self.columns.end
        stop = end + key_states.shape[2]
        self.keys[:, :, end:stop], self.values[:, :, end:stop] = key_states, value_states
        return self.keys[:, :, start:stop], self.values[:, :, start:stop]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.columns.end - self.columns.start

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def move(self, start: int, stop: int, target: int, room: int) -> None:
        """Move columns to another place in a buffer of this size."""
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old if room == old.shape[2] else old.new_zeros(*old.shape[:2], room, old.shape[3])
            moved = old[:, :, start:stop]
            new[:, :, target : target + stop - start] = moved.clone() if new is old else moved
            setattr(self, name, new)


class GeneralRows:
    """Decode one token of every row at a time with the modules of transformers, by the methods of `FastRows`."""

    allows_graph = False

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model, self.device = model, device
        self.vocabulary = model.config.get_text_config(decoder=True).vocab_size
        accepted = _parameters(model)
        self._options: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in accepted:
            self._options["logits_to_keep"] = 1
        self._takes_positions = "position_ids" in accepted

    @property
    def column_bytes(self) -> int:
        """Bytes of a token in the cache, estimated from the config: a model may store other values."""
        config = self.model.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        if getattr(config, "qk_nope_head_dim", None):
            size = max(size, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
        else:
            heads = getattr(config, "num_key_value_heads", None) or heads
        return int(2 * config.num_hidden_layers * heads * size * next(self.model.parameters()).element_size())

    def allocate(self, num_rows: int, columns: int, most_columns: int) -> None:
        self._columns, self._starts = _Columns(), [0] * num_rows
        self._columns.room = columns
        self._cache = self._new_cache(self._columns)
        self._alive: set[int] = set()

    def fill(self, prompts: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]) -> torch.Tensor:
        ids = pad_columns(prompts, on_left=True).to(self.device)
        width = ids.shape[1]
        starts = torch.tensor([[width - len(prompt)] for prompt in prompts], device=self.device)
        places = torch.arange(width, device=self.device)
        own = _Columns()
        own.room = width
        cache = self._new_cache(own)
        logits = self._run(ids, (places >= starts).long(), (places - starts).clamp_(min=0), cache)
        self._make_room(width)
        end = self._columns.end
        every = [row for each in rows for row in each]
        sources = torch.tensor([n for n, each in enumerate(rows) for _ in each], device=self.device)
        for layer, new in zip(self._cache.layers, cache.layers, strict=True):
            if not layer.is_initialized:
                shape = (len(self._starts), *new.keys.shape[1:2], 0)
                layer.lazy_initialization(
                    new.keys.new_empty(*shape, new.keys.shape[3]),
                    new.values.new_empty(*shape, new.values.shape[3]),
                )
            layer.keys[every, :, end - width : end] = new.keys[sources]
            layer.values[every, :, end - width : end] = new.values[sources]
        self._begin(every, [len(p) for p, each in zip(prompts, rows, strict=True) for _ in each])
        return logits

    def save(self, row: int, length: int) -> Block:
        start, end = self._columns.end - length, self._columns.end
        return [
            (layer.keys[row, :, start:end].clone(), layer.values[row, :, start:end].clone())
            for layer in self._cache.layers
        ]

    def load(self, block: Block, rows: Sequence[int]) -> None:
        length = block[0][0].shape[1]
        self._make_room(length)
        end = self._columns.end
        for layer, (keys, values) in zip(self._cache.layers, block, strict=True):
            for row in rows:
                layer.keys[row, :, end - length : end] = keys
                layer.values[row, :, end - length : end] = values
        self._begin(rows, [length] * len(rows))

    def release(self, row: int) -> None:
        self._alive.discard(row)

    def keep(self, rows: Sequence[int]) -> None:
        chosen = torch.tensor(rows, device=self.device)
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[chosen], layer.values[chosen]
        self._starts = [self._starts[row] for row in rows]
        self._alive = {place for place, row in enumerate(rows) if row in self._alive}

    def advance(self) -> bool:
        """Make room for a column; drop the columns that no row uses when the buffer is full."""
        columns = self._columns
        columns.start = min(self._starts[row] for row in self._alive)
        # Rows without an answer attend only to their own token, at position 0.
        self._starts = [
            start if row in self._alive else columns.end for row, start in enumerate(self._starts)
        ]
        if columns.end == columns.room:
            grown = (
                columns.room if columns.start > columns.room // 4 else columns.room + columns.room // 2 + 1
            )
            self._move(columns.start, 0, grown)
        return False

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        columns = self._columns
        starts = torch.tensor(self._starts, device=self.device)[:, None]
        mask = (torch.arange(columns.start, columns.end + 1, device=self.device) >= starts).long()
        found = self._run(tokens[:, None], mask, columns.end - starts, self._cache)
        columns.end += 1
        return found

    def _run(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        options = self._options | ({"position_ids": positions} if self._takes_positions else {})
        found = self.model(input_ids=ids, attention_mask=mask, past_key_values=cache, **options)
        logits: torch.Tensor = found.logits[:, -1]
        return logits

    def _new_cache(self, columns: _Columns) -> Cache:
        layers = DynamicCache(config=self.model.config).layers
        return Cache(layers=[_Layer(columns) for _ in layers])

    def _make_room(self, length: int) -> None:
        """Move the used columns so that prompts of this length end at the last one."""
        columns = self._columns
        if not self._alive:
            columns.start = columns.end = 0
        missing = length - columns.end
        if missing > 0:
            room = max(columns.room, length)
            self._move(columns.start, missing + columns.start, max(room, columns.end + missing))

    def _move(self, start: int, target: int, room: int) -> None:
        """Move the used columns from `start` to `target`."""
        columns = self._columns
        for layer in self._cache.layers:
            layer.move(start, columns.end, target, room)
        by = target - start
        self._starts = [place + by for place in self._starts]
        columns.start, columns.end, columns.room = columns.start + by, columns.end + by, room

    def _begin(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            self._starts[row] = self._columns.end - length
        self._alive.update(rows)


@contextlib.contextmanager
def cast_once(model: nn.Module, precision: Precision) -> Iterator[None]:
    """Cast adapters and head to the compute dtype once, for all passes in the `with` block. Weights must not change there."""
    dtype = precision.autocast or precision.weights
    adapters = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    # Autocast would cast a frozen head in each pass, such as one tied to the embeddings.
    casts_head = precision.autocast is not None and type(head) is nn.Linear and not head.weight.requires_grad
    full = head.weight if casts_head else None
    try:
        with torch.no_grad(), torch.autocast(next(model.parameters()).device.type, enabled=False):
            for adapter in adapters:
                adapter.held = adapter.factors(dtype)
            if full is not None:
                head.weight = nn.Parameter(full.to(dtype), requires_grad=False)
        yield
    finally:
        for adapter in adapters:
            adapter.held = None
        if full is not None:
            head.weight = full


def _parameters(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)
