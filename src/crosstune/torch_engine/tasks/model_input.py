"""The arrays of a batch for a model of transformers or for the fast layers: rows, packed documents, answers that share prompts, and
noise on the embeddings (NEFTune)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import nn

from crosstune.core.protocols import Array
from crosstune.data.batches.forked import ForkedBatch, key_layout
from crosstune.data.batches.token_batch import CHANNEL, FIRST, IGNORED, SECOND, TokenBatch, without_padding
from crosstune.torch_engine.kernels.attention import Documents, Forks
from crosstune.torch_engine.kernels.decoder import FastDecoder
from crosstune.torch_engine.task import Tensors

_OF_PICTURES = (
    "pixel_values",
    "pixel_attention_mask",
    "image_grid_thw",
    "mm_token_type_ids",
    "token_type_ids",
)


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """The arrays of a batch, on the host or on the device. "Flat" indices count over all rows."""

    input_ids: Any
    targets: Any
    """The supervised tokens, row by row."""
    answers: Any
    """The document of each supervised token, numbered over the batch."""
    columns: Any
    """The columns of `input_ids` with a supervised token in some row."""
    places: Any = None
    """The flat indices of the supervised tokens in these columns; None if all are supervised."""
    positions: Any = None
    """Only for packed rows: positions that restart at each document."""
    own_positions: Any = None
    """Only for the part of a row on this rank (--context_parallel): its positions in the row."""
    rows: Any = None
    """The flat indices of the supervised tokens. This and the fields below are only set for the fast layers."""
    bounds: Any = None
    """The flat index of the first token of each packed document, then the number of tokens."""
    key_bounds: Any = None
    """Only for forks: see `Forks`. They have `segments` and `branches`, or in `unpadded_ids` bounds of queries and keys."""
    keys: Any = None
    segments: Any = None
    branches: Any = None
    unpadded_ids: Any = None
    """All documents in one row, without padding; `rows` and `bounds` are then indices of this row."""
    unpadded_positions: Any = None
    real: Any = None
    """For the balance loss of a batch with padding: 1 for tokens, 0 for padding."""
    noise_keys: Any = None
    """For noise on the embeddings, like `input_ids` or, without padding, like `unpadded_ids`."""
    noise_scales: Any = None
    unpadded_noise_keys: Any = None
    unpadded_noise_scales: Any = None
    pixel_values: Any = None
    """The pictures of all rows. This and the fields below are arguments of vision-language models."""
    pixel_attention_mask: Any = None
    image_grid_thw: Any = None
    mm_token_type_ids: Any = None
    token_type_ids: Any = None
    grid_positions: Any = None
    """For models with positions of time, height and width: the positions in the row, then these three."""

    @classmethod
    def of(cls, tensors: Tensors) -> ModelInput:
        """Return the fields from a batch that may have other arrays too."""
        return cls(**{field.name: tensors[field.name] for field in fields(cls) if field.name in tensors})

    def of_pictures(self) -> dict[str, Any]:
        """Return the arguments of vision-language models that are set."""
        return {name: value for name in _OF_PICTURES if (value := getattr(self, name)) is not None}

    def arrays(self) -> dict[str, Array]:
        return {name: array for name, array in vars(self).items() if array is not None}


def fast_arrays(batch: TokenBatch, *, drop_padding: bool) -> dict[str, Array]:
    """Return the arrays of the fast layers. With `drop_padding`, a padded batch becomes one row; supervised tokens keep
    their order."""
    arrays: dict[str, Array] = {}
    is_forked = isinstance(batch, ForkedBatch)
    if drop_padding and (batch.has_padding or is_forked):
        batch = without_padding(batch)
        arrays |= {
            "unpadded_ids": batch.input_ids.astype("int64"),
            "unpadded_positions": batch.positions.astype("int64"),
        }
        if batch.noise_keys is not None and batch.noise_scales is not None:
            arrays["unpadded_noise_keys"] = batch.noise_keys.view("int32")
            arrays["unpadded_noise_scales"] = batch.noise_scales
    [rows] = (batch.targets.reshape(-1) != IGNORED).nonzero()
    arrays["rows"] = rows.astype("int64")
    if isinstance(batch, ForkedBatch):
        if drop_padding:
            bounds, key_bounds, keys = key_layout(batch)
            arrays |= {"bounds": bounds, "key_bounds": key_bounds, "keys": keys}
    elif batch.is_packed:
        starts = np.diff(batch.positions, axis=1, prepend=batch.positions[:, :1] - 1) != 1
        starts[:, 0] = True
        [first] = starts.reshape(-1).nonzero()
        arrays["bounds"] = np.append(first, batch.targets.size).astype("int32")
    return arrays


def fast_hidden(decoder: FastDecoder, given: ModelInput) -> torch.Tensor:
    unpadded, forks = given.unpadded_ids is not None, None
    if given.keys is not None:
        forks = Forks(key_bounds=given.key_bounds, keys=given.keys, longest=len(given.keys))
    elif given.branches is not None:
        forks = Forks(segments=given.segments, branches=given.branches)
    return decoder.hidden(
        given.unpadded_ids if unpadded else given.input_ids,
        positions=given.unpadded_positions if unpadded else given.positions,
        bounds=given.bounds,
        rows=given.rows,
        forks=forks,
    )


def fork_arrays(batch: TokenBatch, *, drop_padding: bool) -> dict[str, Array]:
    """Return the arrays that describe answers with shared prompts; the fast layers may have their own."""
    if drop_padding or not isinstance(batch, ForkedBatch):
        return {}
    return {"segments": batch.segments, "branches": batch.branches}


def fork_mask(given: ModelInput, model: nn.Module) -> torch.Tensor:
    """Return the attention mask of answers with shared prompts for a model of transformers, to be added to the scores."""
    forks = Forks(segments=given.segments, branches=given.branches)
    return added_mask(given.positions, model, forks=forks)


def added_mask(
    positions: torch.Tensor, model: nn.Module, *, forks: Forks | None = None, window: int | None = None
) -> torch.Tensor:
    """Return a mask of attention within documents, to be added to the scores."""
    device = positions.device
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else next(model.parameters()).dtype
    num_rows, length = positions.shape
    hidden = ~Documents(num_rows, length, positions, forks=forks).mask(window, device)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill(hidden, torch.finfo(dtype).min)


def noise_of(given: ModelInput, *, fast: bool) -> tuple[Any, Any]:
    """Return the noise keys and scales of the tokens that the model or the fast layers compute."""
    if fast and given.unpadded_ids is not None:
        return given.unpadded_noise_keys, given.unpadded_noise_scales
    return given.noise_keys, given.noise_scales


_VALUES_AT_A_TIME = 2**23


@contextlib.contextmanager
def noisy_embeddings(
    model: nn.Module, keys: torch.Tensor | None, scales: torch.Tensor | None
) -> Iterator[None]:
    """Add noise to the model's input embeddings within the context; do nothing without keys."""
    if keys is None or scales is None:
        yield
        return

    def add(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + noise(keys, scales, output.shape[-1]).to(output.dtype)

    handle = model.get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def noise(keys: torch.Tensor, scales: torch.Tensor, channels: int) -> torch.Tensor:
    """Return noise in fp32 for int32 keys and fp32 scales of any shape, with `channels` numbers for each."""
    found = torch.empty((keys.numel(), channels), device=keys.device)
    added = torch.arange(channels, dtype=torch.int32, device=keys.device) * _signed(CHANNEL)
    rows = max(1, _VALUES_AT_A_TIME // channels)
    factors = scales.flatten() / math.sqrt(channels)
    for start in range(0, keys.numel(), rows):
        hashed = keys.flatten()[start : start + rows, None] + added
        hashed ^= (hashed >> 16) & 0xFFFF  # int32 shifts copy the sign; the products wrap around
        hashed *= _signed(FIRST)
        hashed ^= (hashed >> 13) & 0x7FFFF
        hashed *= _signed(SECOND)
        hashed ^= (hashed >> 16) & 0xFFFF
        uniform = ((hashed >> 8) & 0xFFFFFF).float() * 2.0**-23 - 1.0
        found[start : start + rows] = uniform * factors[start : start + rows, None]
    return found.reshape(*keys.shape, channels)


def _signed(value: int) -> int:
    """Return 32 bits as a signed integer."""
    return value - 2**32 if value >= 2**31 else value
