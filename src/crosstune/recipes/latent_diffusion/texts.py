"""Choose the texts of a pairs folder: split them, add texts made from spans, drop texts that are too long."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.recipes.latent_diffusion.vocabulary import TokenRows, Vocabulary, count_tokens

EDITION = 1
"""Increase when the same input would give different splits or texts: caches of pairs name it."""
SHORTEST_SPAN = 2
"""Words of the shortest span."""
_MIN_CROPPED = 4
"""Words of the shortest text that is cropped."""
_SHORTEST_MIX = 2 * SHORTEST_SPAN

Words = Sequence[Sequence[str]]
Rows = NDArray[np.int64]


@dataclass(kw_only=True)
class TextSplits:
    """The text indices of each split, and the number of texts dropped for each reason."""

    splits: dict[str, list[int]]
    left_out: dict[str, int] = field(default_factory=dict)
    num_given: int | None = None
    """Number of original texts, if texts made from them follow."""


def divide(
    texts: Sequence[str],
    *,
    validation_share: float,
    max_validation: int,
    given: Mapping[str, Sequence[int]] | None = None,
) -> TextSplits:
    """Split texts by their hash, the same in every build, or keep the `given` splits.

    A duplicate is kept once, in the validation split if it is in both.
    """
    if given is None:
        given = _by_hash(texts, validation_share=validation_share, max_validation=max_validation)
    seen: set[str] = set()
    splits: dict[str, list[int]] = {}
    num_empty = num_twice = 0
    for split in sorted(given, key=lambda name: name == "train"):  # held-out splits first
        rows = splits.setdefault(split, [])
        for row in given[split]:
            key = text_key(texts[row])
            if not key:
                num_empty += 1
            elif key in seen:
                num_twice += 1
            else:
                seen.add(key)
                rows.append(row)
    if not splits.get("train"):
        raise UserError("There is no text to train on.", why="every text is empty or held out.")
    return TextSplits(splits=splits, left_out={"empty": num_empty, "duplicates": num_twice})


def _by_hash(texts: Sequence[str], *, validation_share: float, max_validation: int) -> dict[str, list[int]]:
    limit = int(validation_share * 2**64)
    splits: dict[str, list[int]] = {"train": [], "validation": []}
    for row, text in enumerate(texts):
        number = int.from_bytes(hashlib.sha256(text_key(text).encode()).digest()[:8], "big")
        held_out = number < limit and len(splits["validation"]) < max_validation
        splits["validation" if held_out else "train"].append(row)
    return splits


def clean(text: str) -> str:
    """Return a text on one line, with single spaces."""
    return " ".join(text.split())


def text_key(text: str) -> str:
    """Return a key that is equal for texts with the same words, ignoring case."""
    return clean(text).casefold()


def add_made_texts(
    texts: Sequence[str], divided: TextSplits, *, crops: int = 0, mixes: int = 0, seed: int = 0
) -> list[str]:
    """Append texts made from the training texts, and add them to the training split.

    For each training text, make `crops` random spans of its words, and `mixes` texts that join one of its spans with a
    span of another training text. Skip texts that exist already in any split.
    """
    train = divided.splits["train"]
    words = [texts[row].split() for row in train]
    seen = {text_key(text) for text in texts}
    longer = list(texts)
    divided.num_given = len(longer)
    for made in (_make_crops(words, crops, seed=seed), _make_mixes(words, mixes, seed=seed)):
        for text in made:
            key = text.casefold()  # words with single spaces between, as in `text_key`
            if key not in seen:
                seen.add(key)
                train.append(len(longer))
                longer.append(text)
    return longer


def _make_crops(words: Words, per_text: int, *, seed: int) -> Iterator[str]:
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    owners = np.repeat(np.nonzero(lengths >= _MIN_CROPPED)[0], per_text)
    random = np.random.default_rng(seed)
    # The longer of two draws, since long spans resemble whole texts more.
    sizes = random.integers(SHORTEST_SPAN, np.tile(lengths[owners], (2, 1))).max(axis=0)
    starts = random.integers(lengths[owners] - sizes + 1)
    for owner, start, end in zip(owners.tolist(), starts.tolist(), (starts + sizes).tolist(), strict=True):
        yield " ".join(words[owner][start:end])


def _make_mixes(words: Words, per_text: int, *, seed: int) -> Iterator[str]:
    """Yield pairs of joined spans from two texts; the length is the length of a randomly drawn training text."""
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    usable = np.nonzero(lengths >= SHORTEST_SPAN)[0]
    if not per_text or len(usable) < 2:
        return
    random = np.random.default_rng([seed, 1])
    places = np.repeat(np.arange(len(usable)), per_text)
    others = random.integers(len(usable) - 1, size=len(places))
    others += others >= places  # any text but itself
    first, second = usable[places], usable[others]
    wanted = np.maximum(lengths[lengths > 0], _SHORTEST_MIX)
    totals = np.minimum(random.choice(wanted, len(places)), lengths[first] + lengths[second])
    sizes = random.integers(
        np.maximum(SHORTEST_SPAN, totals - lengths[second]),
        np.minimum(lengths[first], totals - SHORTEST_SPAN) + 1,
    )
    starts = random.integers(lengths[first] - sizes + 1)
    other_starts = random.integers(lengths[second] - (totals - sizes) + 1)
    spans = (first, starts, starts + sizes, second, other_starts, other_starts + totals - sizes)
    for one, start, end, other, other_start, other_end in zip(*(a.tolist() for a in spans), strict=True):
        yield " ".join((*words[one][start:end], *words[other][other_start:other_end]))


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    max_tokens: int
    """Length of the longest text."""
    too_long: str = "error"
    """The action for longer texts: `error` or `drop`."""
    min_count: int = 1
    """Tokens with fewer occurrences in the training split are not in the vocabulary."""
    dtype: str = "fp32"


@dataclass(frozen=True, kw_only=True)
class ChosenTexts:
    """The text indices and tokenizer ids of each split, and the vocabulary."""

    splits: Mapping[str, Rows]
    tokens: Mapping[str, TokenRows]
    vocabulary: Vocabulary
    left_out: Mapping[str, int]

    def rows(self) -> Rows:
        """Return the rows of all splits in ascending order."""
        return np.sort(np.concatenate(list(self.splits.values())))

    def renumbered(self) -> ChosenTexts:
        """Return a copy whose indices refer to the texts of `rows` only."""
        rows = self.rows()
        splits = {split: np.searchsorted(rows, found) for split, found in self.splits.items()}
        return replace(self, splits=splits)


def choose_rows(
    tokens: TokenRows, divided: TextSplits, *, tokenizer: Tokenizer, options: WriteOptions
) -> ChosenTexts:
    """Drop texts without tokens, texts that are too long, and texts with the same ids as another.

    With `too_long` error, raise for an original text that is too long; texts made from spans are always dropped. Of texts
    with the same ids (they may differ in accents), keep a held-out one.
    """
    limit, lengths = options.max_tokens, tokens.lengths
    rows = {split: np.asarray(found, np.int64) for split, found in divided.splits.items()}
    everything = np.concatenate(list(rows.values()))
    long = everything[lengths[everything] > limit]
    rejected = long if divided.num_given is None else long[long < divided.num_given]
    if len(rejected) and options.too_long == "error":
        first = int(rejected.min())
        raise UserError(
            f"{len(rejected):,} texts are longer than {limit} tokens.",
            why=f"the first is row {first}, counted from 0, with {lengths[first]} tokens; "
            "a truncated text would not match its vector.",
            do=f"use --max_tokens {lengths[rejected].max()}, or drop them with --too_long drop",
        )
    fitting = {
        split: found[(lengths[found] > 0) & (lengths[found] <= limit)] for split, found in rows.items()
    }
    splits = _without_same_ids(tokens, fitting)
    if not len(splits["train"]):
        raise UserError(
            "There is no text to train on.",
            why=f"no training text has 1 to {limit} tokens and differs in them from the held-out texts.",
            do="use a larger --max_tokens, or other texts",
        )
    chosen = {split: tokens.take(found) for split, found in splits.items()}
    return ChosenTexts(
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
    """Return the splits with each sequence of ids once: in a held-out split, or at its first row."""
    seen: set[bytes] = set()
    kept: dict[str, Rows] = {}
    for split in sorted(splits, key=lambda name: name == "train"):  # held-out splits first
        found = {tokens[row].tobytes(): row for row in splits[split][::-1].tolist()}
        kept[split] = np.sort([row for ids, row in found.items() if ids not in seen]).astype(np.int64)
        seen |= found.keys()
    return kept


def _make_vocabulary(train: TokenRows, *, tokenizer: Tokenizer, min_count: int) -> Vocabulary:
    kept = count_tokens(train, min_count=min_count)
    if not len(kept):
        most = int(np.bincount(train.ids).max())
        raise UserError(
            f"--min_count {min_count} leaves no token in the vocabulary.",
            why=f"no token occurs more than {most:,} times in the {len(train):,} training texts.",
            do=f"use --min_count {most} or less, or more texts",
        )
    return Vocabulary(tokenizer=tokenizer, kept=kept)
