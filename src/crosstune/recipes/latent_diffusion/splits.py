"""Clean texts and divide them into training and validation, with no text in both."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from crosstune.core.errors import UserError


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
