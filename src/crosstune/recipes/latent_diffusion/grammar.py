"""Generate short sentences from a grammar, with vectors from a fixed random map of their words.

The data needs no download, and a small model can learn it perfectly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.recipes.latent_diffusion.vocabulary import TOKENIZER

GRAMMAR = "grammar"
DIM = 96
NUM_TEXTS = 22_000
MAX_TOKENS = 12
EDITION = 1
"""Increase when the sentences or their vectors change."""
_WORDS = """
size tiny small large huge young old quiet brave
subject cat dog horse robot teacher farmer pilot sailor baker child nurse judge
verb sees finds paints carries follows hides repairs sells loves counts
colour red blue green black white golden silver striped
object ball boat book chair clock guitar kite lamp mirror ring wagon window
place garden kitchen harbour forest market station tower valley desert museum
time today tonight yesterday tomorrow
"""
_SLOTS: Mapping[str, Sequence[str]] = {
    slot: words for slot, *words in (line.split() for line in _WORDS.strip().splitlines())
}
_FUNCTION_WORDS = ("the", "a", "in")
_UNKNOWN_WORD = "[UNK]"


def make_texts(count: int = NUM_TEXTS, *, seed: int = 0) -> list[str]:
    """Return different sentences: 'the tiny cat sees a red ball in the garden today', some without place or time."""
    draw = np.random.default_rng(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        words = {slot: str(draw.choice(choices)) for slot, choices in _SLOTS.items()}
        text = f"the {words['size']} {words['subject']} {words['verb']} a {words['colour']} {words['object']}"
        shape = draw.integers(3)
        if shape:
            text += f" in the {words['place']}"
        if shape == 2:
            text += f" {words['time']}"
        found[text] = None
    return list(found)


class GrammarEncoder:
    """Embed texts as the normalised sum of one random vector for each content word."""

    def __init__(self, *, dim: int = DIM, seed: int = 0) -> None:
        self.dim = dim
        words = [word for choices in _SLOTS.values() for word in choices]
        self._places = {word: place for place, word in enumerate(words)}
        self._vectors = np.random.default_rng(seed).normal(0, 1, (len(words) + 1, dim)).astype(np.float32)

    def record(self) -> dict[str, Any]:
        """Return the identity of the encoder, for the manifest."""
        return {
            "name": GRAMMAR,
            "kind": GRAMMAR,
            "dim": self.dim,
            "sha256": hashlib.sha256(self._vectors.tobytes()).hexdigest(),
        }

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        rows = np.zeros((len(texts), self.dim), np.float32)
        for row, text in enumerate(texts):
            known = [self._places[word] for word in text.split() if word in self._places]
            rows[row] = self._vectors[known].sum(axis=0) if known else self._vectors[-1]
        normalised: NDArray[np.float32] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return normalised


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [_UNKNOWN_WORD, *_FUNCTION_WORDS, *(word for choices in _SLOTS.values() for word in choices)]
    tokenizer = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(words)}, unk_token=_UNKNOWN_WORD)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / TOKENIZER))
