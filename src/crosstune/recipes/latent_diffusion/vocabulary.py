"""Convert texts to model ids and back, with a vocabulary of only the tokens that the training texts use."""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.files.json_fields import check_fields, list_of, whole
from crosstune.files.json_files import read_object, write_json

PAD, MASK, UNKNOWN = 0, 1, 2
NUM_SPECIAL = 3
"""Number of special ids, before the kept tokens."""
VOCABULARY = "vocabulary.json"
TOKENIZER = "tokenizer.json"
_FIELDS = {"kept": list_of(whole(0, 2**31 - 1))}

Ids = NDArray[np.int32]
OnCount = Callable[[int, int], None]
"""Called with the number of finished texts and their total."""
_CHUNK = 16_384
"""Texts tokenized at a time: the tokenizer's result for each is about a kilobyte."""


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """The concatenated ids of all rows, and the end of each row."""

    ids: Ids
    ends: NDArray[np.int64]

    @classmethod
    def from_lists(cls, rows: Iterable[Iterable[int]]) -> TokenRows:
        ids, ends = array("i"), array("q")
        for row in rows:
            ids.extend(row)
            ends.append(len(ids))
        return cls(ids=np.array(ids, np.int32), ends=np.array(ends, np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> Ids:
        row = range(len(self))[row]
        return self.ids[self.ends[row] - self.lengths[row] : self.ends[row]]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.ends, prepend=0)

    def take(self, rows: NDArray[Any]) -> TokenRows:
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

    def rows() -> Iterator[list[int]]:
        for start in range(0, len(texts), _CHUNK):
            chunk = list(texts[start : start + _CHUNK])
            for item in tokenizer.rust.encode_batch_fast(chunk, add_special_tokens=special_tokens):
                yield item.ids
            if on_count is not None:
                on_count(start + len(chunk), len(texts))

    return TokenRows.from_lists(rows())


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokenizer ids in the model's vocabulary. A token's model id is its index among them, after the special ids."""

    tokenizer: Tokenizer
    kept: Ids

    @property
    def size(self) -> int:
        return NUM_SPECIAL + len(self.kept)

    @property
    def digest(self) -> str:
        return self.tokenizer.digest

    def reduce(self, rows: TokenRows) -> TokenRows:
        """Convert tokenizer ids to model ids; ids outside the vocabulary become UNKNOWN."""
        places = np.searchsorted(self.kept, rows.ids).clip(max=len(self.kept) - 1)
        ids = np.where(self.kept[places] == rows.ids, places + NUM_SPECIAL, UNKNOWN)
        return TokenRows(ids=ids.astype(np.int32), ends=rows.ends)

    def decode_batch(self, rows: Iterable[Iterable[int]]) -> list[str]:
        """Convert model ids to texts; drop special ids."""
        kept = [[int(self.kept[i - NUM_SPECIAL]) for i in row if i >= NUM_SPECIAL] for row in rows]
        return self.tokenizer.rust.decode_batch(kept)

    def show(self, ids: Iterable[int]) -> str:
        """Return a partly decoded text, with a block for each masked token."""
        words: list[str] = []
        for token in ids:
            if token == PAD:
                continue
            piece = {MASK: "░░", UNKNOWN: "?"}.get(token)
            if piece is None:
                piece = self.tokenizer.rust.id_to_token(int(self.kept[token - NUM_SPECIAL])) or "?"
            if piece.startswith("##") and words:
                words[-1] += piece[2:]
            else:
                words.append(piece)
        return " ".join(words)

    def normalize(self, texts: Sequence[str]) -> list[str]:
        """Tokenize and decode texts: the output of a perfect model."""
        rows = tokenize(self.tokenizer, texts)
        return self.tokenizer.rust.decode_batch(rows.tolists())

    def save(self, folder: Path, *, tokenizer_folder: Path) -> None:
        shutil.copyfile(tokenizer_folder / TOKENIZER, folder / TOKENIZER)
        write_json(folder / VOCABULARY, {"kept": self.kept.tolist()})


def count_tokens(rows: TokenRows, *, min_count: int) -> Ids:
    """Return the ids that occur at least `min_count` times, in ascending order."""
    return np.nonzero(np.bincount(rows.ids) >= min_count)[0].astype(np.int32)


def load_vocabulary(folder: Path) -> Vocabulary:
    path = folder / VOCABULARY
    found = read_object(path)
    check_fields(found, _FIELDS, source=path, required=("kept",))
    kept = np.asarray(found["kept"], np.int32)
    if len(kept) == 0 or np.any(np.diff(kept) <= 0):
        raise UserError(
            f"{path} is damaged.",
            why="the kept token ids do not ascend.",
            do="build the folder again: crosstune latents build",
        )
    return Vocabulary(tokenizer=Tokenizer.from_folder(folder), kept=kept)
