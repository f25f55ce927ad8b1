"""Choose the texts of a folder of pairs by their token ids, before any is embedded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.data.tokenizer import Tokenizer
from crosstune.recipes.latent_diffusion.splits import Divided
from crosstune.recipes.latent_diffusion.token_rows import TokenRows
from crosstune.recipes.latent_diffusion.vocabulary import Vocabulary, count_tokens

Rows = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    max_tokens: int
    """Length of the longest text."""
    too_long: str = "error"
    """What to do with longer texts: `error` or `drop`."""
    min_count: int = 1
    """Tokens that are rarer in the training split are left out of the vocabulary."""
    dtype: str = "fp32"


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The indices of the texts of each split, their tokenizer ids, and the vocabulary."""

    splits: Mapping[str, Rows]
    tokens: Mapping[str, TokenRows]
    vocabulary: Vocabulary
    left_out: Mapping[str, int]

    def rows(self) -> Rows:
        """Return the rows of all splits in ascending order."""
        return np.sort(np.concatenate(list(self.splits.values())))

    def renumbered(self) -> Chosen:
        """Return the same with indices into the texts of `rows` alone."""
        rows = self.rows()
        splits = {split: np.searchsorted(rows, found) for split, found in self.splits.items()}
        return replace(self, splits=splits)


def choose_rows(
    tokens: TokenRows, divided: Divided, *, tokenizer: Tokenizer, options: WriteOptions
) -> Chosen:
    """Drop texts without tokens, texts that are too long, and all but one of the texts with the same ids.

    A given text that is too long raises unless `too_long` is drop; one made from other texts is always dropped. Of texts
    with the same ids (they differ in accents, say), a held-out one is kept.
    """
    limit, lengths = options.max_tokens, tokens.lengths
    rows = {split: np.asarray(found, np.int64) for split, found in divided.splits.items()}
    everything = np.concatenate(list(rows.values()))
    long = everything[lengths[everything] > limit]
    refused = long if divided.num_given is None else long[long < divided.num_given]
    if len(refused) and options.too_long == "error":
        first = int(refused.min())
        raise UserError(
            f"{len(refused):,} texts are longer than {limit} tokens.",
            why=f"the first is row {first}, counted from 0, with {lengths[first]} tokens; "
            "a text cut short would not be that of its vector.",
            do=f"use --max_tokens {lengths[refused].max()}, or leave them out with --too_long drop",
        )
    fitting = {
        split: found[(lengths[found] > 0) & (lengths[found] <= limit)] for split, found in rows.items()
    }
    if not len(fitting.get("train", ())):
        raise UserError(f"No text has 1 to {limit} tokens.", do="use a larger --max_tokens, or other texts")
    splits = _without_same_ids(tokens, fitting)
    if not len(splits["train"]):
        raise UserError(
            "There is no text to train on.", why="every text has the tokens of one that is held out."
        )
    chosen = {split: tokens.take(found) for split, found in splits.items()}
    return Chosen(
        splits=splits,
        tokens=chosen,
        vocabulary=_make_vocabulary(chosen["train"], tokenizer=tokenizer, min_count=options.min_count),
        left_out=divided.left_out
        | {
            "too_long": len(long),
            "without_tokens": int((lengths[everything] == 0).sum()),
            "equal_in_tokens": sum(map(len, fitting.values())) - sum(map(len, splits.values())),
        },
    )


def _without_same_ids(tokens: TokenRows, splits: Mapping[str, Rows]) -> dict[str, Rows]:
    """Return the splits with each sequence of ids once: held out, or else at its first row."""
    seen: set[bytes] = set()
    kept: dict[str, Rows] = {}
    for split in sorted(splits, key=lambda name: name == "train"):  # held-out splits first
        is_new = np.ones(len(splits[split]), bool)
        for place, row in enumerate(splits[split].tolist()):
            ids = tokens[row].tobytes()
            is_new[place] = ids not in seen
            seen.add(ids)
        kept[split] = splits[split][is_new]
    return kept


def _make_vocabulary(train: TokenRows, *, tokenizer: Tokenizer, min_count: int) -> Vocabulary:
    kept = count_tokens(train, min_count=min_count)
    if not len(kept):
        most = int(np.bincount(train.ids).max())
        raise UserError(
            f"--min_count {min_count} leaves no token in the vocabulary.",
            why=f"no token is more than {most:,} times in the {len(train):,} training texts.",
            do=f"use --min_count {most} or less, or more texts",
        )
    return Vocabulary(tokenizer=tokenizer, kept=kept)
