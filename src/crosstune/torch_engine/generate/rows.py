"""The interface of a model to the loop of continuous batching: rows with caches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

Block = list[tuple[torch.Tensor, torch.Tensor]]
"""The keys and values of a prompt in every layer."""
PACK_ON_GPU, PACK_ON_CPU = 8192, 2048
"""Tokens of prompts computed at once, with their padding."""


class Rows(Protocol):
    """The rows of a model, each with the cache of one answer."""

    device: torch.device
    vocabulary: int

    @property
    def column_bytes(self) -> int:
        """Bytes of a token in the cache."""

    @property
    def allows_graph(self) -> bool:
        """True if `step` can be a CUDA graph."""

    def allocate(self, num_rows: int, columns: int, most_columns: int) -> None:
        """Make a cache; it grows if answers need more columns. No row needs more than `most_columns`."""

    def fill(self, prompts: Any, rows: Any) -> torch.Tensor:
        """Compute each prompt once, write it to all of its rows, and return the logits after it."""

    def save(self, row: int, length: int) -> Block:
        """Return a copy of the prompt that `fill` has just written to a row."""

    def load(self, block: Block, rows: Sequence[int]) -> None:
        """Write a saved prompt to rows."""

    def release(self, row: int) -> None:
        """Mark the end of a row's answer; its cache may be overwritten."""

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""

    def advance(self) -> bool:
        """Make room for a token in every row; return True if the cache moved in memory."""

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append a token to every row, and return the logits after it."""


def split_packs(prompts: Sequence[Sequence[int]], device: torch.device) -> Iterator[slice]:
    """Yield runs of prompts, given longest first, that are computed at once."""
    most, start = PACK_ON_CPU if device.type == "cpu" else PACK_ON_GPU, 0
    while start < len(prompts):
        count = max(1, most // len(prompts[start]))
        yield slice(start, start + count)
        start += count


def pad_columns(prompts: Sequence[Sequence[int]], *, on_left: bool) -> torch.Tensor:
    """Return prompts as rows of equal length."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        start = width - len(prompt) if on_left else 0
        ids[row, start : start + len(prompt)] = torch.tensor(prompt)
    return ids
