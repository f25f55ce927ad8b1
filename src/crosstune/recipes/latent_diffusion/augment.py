"""Make further training texts of those that are there: random spans of each, and spans of two joined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.recipes.latent_diffusion.splits import Divided, text_key

SHORTEST_SPAN = 2
"""Words of the shortest span."""
_FEWEST_CROPPED = 4
"""Words of the shortest text that spans are taken from: the spans are shorter than the text."""
_SHORTEST_MIX = 2 * SHORTEST_SPAN

Words = Sequence[Sequence[str]]
Ints = NDArray[np.int64]


def add_made_texts(
    texts: Sequence[str], divided: Divided, *, crops: int = 0, mixes: int = 0, seed: int = 0
) -> list[str]:
    """Return the texts with texts made of the training texts after them, and add those to the training split.

    For each training text, `crops` are random spans of its words, and `mixes` a span of it followed by one of another
    training text. A small corpus then has many more different texts. One that is a text already, of any split, is left
    out.
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
    sizes, starts = draw_spans(lengths[owners], seed=seed)
    for owner, start, end in zip(owners.tolist(), starts.tolist(), (starts + sizes).tolist(), strict=True):
        yield " ".join(words[owner][start:end])


def _make_mixes(words: Words, per_text: int, *, seed: int) -> Iterator[str]:
    """Yield joined spans of two texts, of a number of words that one of the training texts has."""
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


def draw_spans(lengths: Ints, *, seed: int) -> tuple[Ints, Ints]:
    """Return a size from 2 to below each length, and a start at which a span of that size fits.

    These are the numbers of `draw_spans_singly`, drawn at once: numpy scales a 32-bit number to a range by one product,
    and draws another one where the remainder would favour some values, which is very rare for ranges as small as here.
    """
    raw = np.random.default_rng(seed).integers(2**32, size=(len(lengths), 2), dtype=np.uint32)
    sizes, refused = _scale(raw[:, 0], lengths - SHORTEST_SPAN)
    sizes += SHORTEST_SPAN
    starts, others_refused = _scale(raw[:, 1], lengths - sizes + 1)
    if refused or others_refused:
        return draw_spans_singly(lengths, seed=seed)
    return sizes, starts


def draw_spans_singly(lengths: Ints, *, seed: int) -> tuple[Ints, Ints]:
    """Do as `draw_spans`, one number after the other."""
    random = np.random.default_rng(seed)
    found = np.zeros((len(lengths), 2), np.int64)
    for row, length in enumerate(lengths.tolist()):
        size = random.integers(SHORTEST_SPAN, length)
        found[row] = size, random.integers(length - size + 1)
    return found[:, 0], found[:, 1]


def _scale(raw: NDArray[np.uint32], ranges: Ints) -> tuple[Ints, bool]:
    """Return 32-bit numbers scaled to their ranges, and whether numpy would have refused one of them."""
    below: NDArray[Any] = ranges.astype(np.uint64)
    products = raw.astype(np.uint64) * below
    refused = (products & np.uint64(2**32 - 1)) < (np.uint64(2**32) - below) % np.maximum(below, np.uint64(1))
    return (products >> np.uint64(32)).astype(np.int64), bool(refused.any())
