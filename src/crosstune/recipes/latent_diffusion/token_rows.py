"""Hold the token ids of many texts in one array: a list of lists needs ten times the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.data.tokenizer import Tokenizer

Ids = NDArray[np.int32]
OnCount = Callable[[int, int], None]
"""Called with the number of texts done and their total."""
_CHUNK = 16_384
"""Texts tokenized at a time: the tokenizer returns a kilobyte for each."""


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """The concatenated ids of all rows, and the end of each row."""

    ids: Ids
    ends: NDArray[np.int64]

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int] | Ids]) -> TokenRows:
        ends = np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)))
        total = int(ends[-1]) if len(ends) else 0
        return cls(ids=np.fromiter(chain.from_iterable(rows), np.int32, total), ends=ends)

    @classmethod
    def join(cls, parts: Sequence[TokenRows]) -> TokenRows:
        before = np.cumsum([0, *(len(part.ids) for part in parts)])
        return cls(
            ids=np.concatenate([np.zeros(0, np.int32), *(part.ids for part in parts)]),
            ends=np.concatenate(
                [np.zeros(0, np.int64), *(p.ends + start for p, start in zip(parts, before, strict=False))]
            ),
        )

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> Ids:
        row = range(len(self))[row]
        return self.ids[self.ends[row] - self.lengths[row] : self.ends[row]]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.ends, prepend=0)

    def take(self, rows: NDArray[Any]) -> TokenRows:
        """Return some of the rows."""
        rows = np.asarray(rows, np.int64)
        lengths = self.lengths[rows]
        ends = np.cumsum(lengths)
        places = np.repeat(self.ends[rows] - ends, lengths) + np.arange(lengths.sum())
        return TokenRows(ids=self.ids[places], ends=ends)

    def stack(self, *, width: int, dtype: Any = np.uint32) -> NDArray[Any]:
        """Return the rows as one array padded with 0."""
        stacked = np.zeros((len(self), width), dtype)
        stacked[np.arange(width) < self.lengths[:, None]] = self.ids
        return stacked

    def tolists(self) -> list[list[int]]:
        return [self[row].tolist() for row in range(len(self))]


def tokenize(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    special_tokens: bool = False,
    on_count: OnCount | None = None,
) -> TokenRows:
    """Return the tokenizer's ids of each text."""
    parts = []
    for start in range(0, len(texts), _CHUNK):
        chunk = list(texts[start : start + _CHUNK])
        encoded = tokenizer.rust.encode_batch_fast(chunk, add_special_tokens=special_tokens)
        parts.append(TokenRows.from_lists([item.ids for item in encoded]))
        if on_count is not None:
            on_count(start + len(chunk), len(texts))
    return TokenRows.join(parts)
