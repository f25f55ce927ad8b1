"""Clean texts and divide them into training and validation, with no text in both."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from crosstune.core.errors import UserError


@dataclass(kw_only=True)
class Divided:
    """The rows of each split as places in the list of texts, and how many were left out for which reason."""

    splits: dict[str, list[int]]
    left_out: dict[str, int] = field(default_factory=dict)


def clean(text: str) -> str:
    """Return a text on one line, with single spaces."""
    return " ".join(text.split())


def text_key(text: str) -> str:
    """Return what makes two texts the same: their words, whatever their case."""
    return clean(text).casefold()


def divide(
    texts: Sequence[str],
    *,
    validation_share: float,
    most_validation: int,
    given: Mapping[str, Sequence[int]] | None = None,
) -> Divided:
    """Divide texts by their hash, so that a text is in the same split wherever it is built; or keep the splits that
    the data comes with. A text that occurs twice is kept once, in the validation split if it is in both."""
    if given is None:
        given = _by_hash(texts, validation_share=validation_share, most_validation=most_validation)
    seen: set[str] = set()
    splits: dict[str, list[int]] = {}
    num_empty = num_twice = 0
    for split in sorted(given, key=lambda name: name == "train"):  # what is held out comes first
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


def add_crops(texts: Sequence[str], divided: Divided, *, per_text: int, seed: int = 0) -> list[str]:
    """Return the texts with random spans of words of the training texts after them, and add those to the training split:
    a small corpus then has many more different texts. A span that is a text already is left out."""
    random = np.random.default_rng(seed)
    seen = {text_key(text) for text in texts}
    longer = list(texts)
    train = divided.splits["train"]
    for row in list(train):
        words = texts[row].split()
        for _ in range(per_text if len(words) > 3 else 0):
            size = int(random.integers(2, len(words)))
            start = int(random.integers(len(words) - size + 1))
            span = " ".join(words[start : start + size])
            if (key := text_key(span)) not in seen:
                seen.add(key)
                train.append(len(longer))
                longer.append(span)
    return longer


def check_no_overlap(texts: Mapping[str, Sequence[str]]) -> None:
    """Raise when a text is in two splits."""
    keys = {split: {text_key(text) for text in found} for split, found in texts.items()}
    names = sorted(keys)
    for place, one in enumerate(names):
        for other in names[place + 1 :]:
            assert not keys[one] & keys[other], f"{one} and {other} share texts"


def _by_hash(texts: Sequence[str], *, validation_share: float, most_validation: int) -> dict[str, list[int]]:
    limit = int(validation_share * 2**64)
    splits: dict[str, list[int]] = {"train": [], "validation": []}
    for row, text in enumerate(texts):
        number = int.from_bytes(hashlib.sha256(text_key(text).encode()).digest()[:8], "big")
        held_out = number < limit and len(splits["validation"]) < most_validation
        splits["validation" if held_out else "train"].append(row)
    return splits
