"""Make more training texts: random spans of each text, and joined spans of two texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from crosstune.recipes.latent_diffusion.splits import Divided, text_key

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
