"""Summarize a dataset for the page of a run: a histogram of lengths, and one example with its supervised tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.data.batches.token_batch import Example
from crosstune.data.tokens.corpus import Corpus
from crosstune.data.tokens.tokenizer import Tokenizer

MAX_BINS = 24
MAX_CHARACTERS = 4000
"""Maximum characters of the example; the middle of longer examples is omitted."""


def summarize_corpus(corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the lengths and an example of a corpus, for plan.json and the page of a run."""
    if not len(corpus):
        return {}
    lengths = corpus.lengths()
    typical = int(np.abs(lengths - int(np.median(lengths))).argmin())
    example = corpus[typical]
    pieces = marked_pieces(example, tokenizer)
    return {
        "lengths": length_histogram(lengths),
        "example": {
            "row": int(example.index) + 1,
            "tokens": len(example.tokens),
            "pieces": [{"text": text, "supervised": counts} for text, counts in _cut(pieces)],
        },
    }


def length_histogram(lengths: NDArray[np.int64]) -> dict[str, Any]:
    """Return the number of examples in bins of equal, round width: bin i counts the lengths from first + i * width on."""
    low, high = int(lengths.min()), int(lengths.max())
    width = _round_width((high - low + 1) / MAX_BINS)
    first = low // width * width
    counts = np.bincount((lengths - first) // width)
    return {"first": first, "width": width, "counts": counts.tolist()}


def _round_width(rough: float) -> int:
    """Return the smallest of 1, 2, 5 times a power of ten that is at least `rough`."""
    power = 10 ** max(0, math.floor(math.log10(rough))) if rough >= 1 else 1
    return next(size * power for size in (1, 2, 5, 10) if size * power >= rough)


def marked_pieces(example: Example, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """Return the text of an example in pieces: (text, supervised)."""
    pieces: list[tuple[str, bool]] = []
    marks, start = example.supervised, 0
    for place in range(1, len(marks) + 1):
        if place == len(marks) or marks[place] != marks[start]:
            text = tokenizer.decode(example.tokens[start:place].tolist(), keep_special=True)
            pieces.append((text, bool(marks[start])))
            start = place
    return pieces


def _cut(pieces: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Omit the middle of an example that is too long for a page."""
    total, half = sum(len(text) for text, _ in pieces), MAX_CHARACTERS // 2
    if total <= MAX_CHARACTERS:
        return pieces
    head, tail, start = [], [], 0
    for text, supervised in pieces:
        head.append((text[: max(0, half - start)], supervised))
        tail.append((text[max(0, total - half - start) :], supervised))
        start += len(text)
    middle = (f" … [{total - MAX_CHARACTERS:,} more characters] … ", False)
    return [piece for piece in (*head, middle, *tail) if piece[0]]
