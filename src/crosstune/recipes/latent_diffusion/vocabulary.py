"""Map texts to token ids of a latent-diffusion model and back, with a tokenizer reduced to the tokens in use."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from crosstune.core.errors import UserError
from crosstune.core.json_fields import check_fields, list_of, whole
from crosstune.core.json_files import read_object, write_json
from crosstune.data.tokenizer import Tokenizer
from crosstune.recipes.latent_diffusion.token_rows import Ids, TokenRows, tokenize

PAD, MASK, UNKNOWN = 0, 1, 2
NUM_SPECIAL = 3
"""Number of special ids, before the kept tokens."""
VOCABULARY = "vocabulary.json"
TOKENIZER = "tokenizer.json"
_FIELDS = {"kept": list_of(whole(0, 2**31 - 1))}


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokenizer ids that the model knows; a token's model id is its place among them, after the special ids."""

    tokenizer: Tokenizer
    kept: Ids

    @property
    def size(self) -> int:
        return NUM_SPECIAL + len(self.kept)

    @property
    def digest(self) -> str:
        return self.tokenizer.digest

    @cached_property
    def _places(self) -> Ids:
        """The model id of each tokenizer id."""
        highest = int(max(self.tokenizer.rust.get_vocab(with_added_tokens=True).values(), default=0))
        places = np.full(max(highest, int(self.kept.max(initial=0))) + 1, UNKNOWN, np.int32)
        places[self.kept] = np.arange(NUM_SPECIAL, self.size, dtype=np.int32)
        return places

    def encode(self, texts: Sequence[str]) -> TokenRows:
        return self.reduce(tokenize(self.tokenizer, texts))

    def reduce(self, rows: TokenRows) -> TokenRows:
        """Convert tokenizer ids to model ids; ids outside the vocabulary become UNKNOWN."""
        inside = np.clip(rows.ids, 0, len(self._places) - 1)
        ids = np.where(rows.ids == inside, self._places[inside], UNKNOWN).astype(np.int32)
        return TokenRows(ids=ids, ends=rows.ends)

    def expand(self, ids: Iterable[int]) -> list[int]:
        """Convert model ids to tokenizer ids, without special ones."""
        return [int(self.kept[i - NUM_SPECIAL]) for i in ids if NUM_SPECIAL <= i < self.size]

    def decode_batch(self, rows: Iterable[Iterable[int]]) -> list[str]:
        texts: list[str] = self.tokenizer.rust.decode_batch([self.expand(row) for row in rows])
        return texts

    def show(self, ids: Iterable[int]) -> str:
        """Return a partly decoded text, with a block for each masked token."""
        words: list[str] = []
        for token in ids:
            if token == PAD:
                continue
            piece = "░░" if token == MASK else "?" if token == UNKNOWN else self._piece(token)
            if piece.startswith("##") and words:
                words[-1] += piece[2:]
            else:
                words.append(piece)
        return " ".join(words)

    def _piece(self, token: int) -> str:
        return self.tokenizer.rust.id_to_token(int(self.kept[token - NUM_SPECIAL])) or "?"

    def normalise(self, texts: Sequence[str]) -> list[str]:
        """Return the texts as a perfect model would write them: tokenized and decoded."""
        rows = tokenize(self.tokenizer, texts)
        normalised: list[str] = self.tokenizer.rust.decode_batch(rows.tolists())
        return normalised

    def save(self, folder: Path, *, tokenizer_folder: Path) -> None:
        source = tokenizer_folder / TOKENIZER
        if source.resolve() != (folder / TOKENIZER).resolve():
            shutil.copyfile(source, folder / TOKENIZER)
        write_json(folder / VOCABULARY, {"kept": self.kept.tolist()})


def count_tokens(rows: TokenRows, *, min_count: int) -> Ids:
    """Return the ids that occur at least `min_count` times, in ascending order."""
    return np.nonzero(np.bincount(rows.ids) >= min_count)[0].astype(np.int32)


def load_vocabulary(folder: Path) -> Vocabulary:
    path = folder / VOCABULARY
    found = read_object(path)
    check_fields(found, _FIELDS, source=path, required=("kept",))
    kept = np.asarray(found["kept"], np.int32)
    if len(kept) == 0 or np.any(np.diff(kept) <= 0):
        raise UserError(
            f"{path} is damaged.",
            why="the kept token ids do not ascend.",
            do="build the folder again: crosstune latents build",
        )
    return Vocabulary(tokenizer=Tokenizer.from_folder(folder), kept=kept)
