"""Make the arrays that a sentence encoder reads from token ids: special tokens around them, cut and padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.data.tokenizer import Tokenizer
from crosstune.recipes.latent_diffusion.token_rows import TokenRows, tokenize

_TRIALS = ("a", "the cat sees 3 dogs")


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The special tokens before and after each text."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.before) + len(self.after)


def find_frame(tokenizer: Tokenizer) -> Frame | None:
    """Return the special tokens that a tokenizer puts around a text; None if it does something else with it."""
    found = set()
    for text in _TRIALS:
        plain = tokenizer.rust.encode(text, add_special_tokens=False).ids
        whole = tokenizer.rust.encode(text).ids
        if len(whole) - len(plain) != tokenizer.rust.num_special_tokens_to_add(False):
            return None
        starts = [n for n in range(len(whole) - len(plain) + 1) if whole[n : n + len(plain)] == plain]
        if not plain or len(starts) != 1:
            return None
        found.add((tuple(whole[: starts[0]]), tuple(whole[starts[0] + len(plain) :])))
    if len(found) != 1:
        return None
    before, after = found.pop()
    return Frame(before=before, after=after)


class EncoderInput:
    """Texts for an encoder. Where their ids are known, they are not tokenized again."""

    def __init__(
        self, tokenizer: Tokenizer, texts: Sequence[str], *, longest: int, tokens: TokenRows | None
    ) -> None:
        frame = find_frame(tokenizer)
        self._frame = frame or Frame(before=(), after=())
        if frame is None:
            tokenizer.rust.enable_truncation(longest)
            self._tokens = tokenize(tokenizer, texts, special_tokens=True)
            tokenizer.rust.no_truncation()
        else:
            self._tokens = tokens if tokens is not None else tokenize(tokenizer, texts)
        assert len(self._tokens) == len(texts), "a row of ids for each text"
        self._longest = longest - frame.size if frame is not None else None
        """The tokens that a text may have; None where the tokenizer has cut it."""

    def is_empty(self) -> NDArray[np.bool_]:
        """Return for each text whether the encoder has no token to read: it has none, and none is put around it."""
        empty: NDArray[np.bool_] = self._tokens.lengths + self._frame.size == 0
        return empty

    def batch(self, rows: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids and the attention mask of some texts, as wide as the longest of them."""
        frame = self._frame
        texts = self._tokens.take(rows, longest=self._longest)
        lengths = texts.lengths + frame.size
        width = int(lengths.max(initial=0))
        ids = texts.stack(width=width, dtype=np.int64, start=len(frame.before))
        ids[:, : len(frame.before)] = frame.before
        for place, token in enumerate(frame.after):
            ids[np.arange(len(ids)), lengths - len(frame.after) + place] = token
        return ids, (np.arange(width) < lengths[:, None]).astype(np.int64)
