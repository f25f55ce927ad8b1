"""Tokenize a source: a small one into memory, a large one into cache files that are made once."""

from __future__ import annotations

import errno
import hashlib
import json
from pathlib import Path
from typing import Any

from crosstune.core.atomic_files import clear_leftovers, put_in_place, staging_folder
from crosstune.core.disk import NO_ROOM
from crosstune.core.errors import UserError
from crosstune.core.json_files import read_object, write_json
from crosstune.core.plain_files import UnreadableFile
from crosstune.core.user_paths import cache_base
from crosstune.data.encode import Encoder, OnProgress, encode_source
from crosstune.data.sources import Source
from crosstune.data.store import ARRAYS, DiskFiles, MemoryFiles, StoreWriter, TokenStore, open_store

LAYOUT = 3
"""Increase when rows are tokenized differently, so that cached stores are made again."""
IN_MEMORY_BYTES = 64 << 20
MARKER = "store.json"


def tokenize_source(
    source: Source,
    encoder: Encoder,
    *,
    limit: int,
    cache: Path | None,
    in_memory_bytes: int,
    progress: OnProgress | None,
) -> tuple[TokenStore, dict[str, Any]]:
    """Tokenize a source of one format; return its tokens, and everything that decides them."""
    tokenizer = encoder.tokenizer
    decides = {
        "layout": LAYOUT,
        "source": source.digest(),
        "tokenizer": tokenizer.digest,
        "template": tokenizer.chat_template,
        "specials": [tokenizer.leading_bos, tokenizer.bos_token, tokenizer.eos_token],
        "format": source.form,
        "whole": encoder.whole,
        "rows": limit,
    }
    if source.size_bytes <= in_memory_bytes:
        memory = MemoryFiles()
        facts = encode_source(source, encoder, StoreWriter(memory.files), limit=limit, progress=progress)
        return memory.to_store(facts), decides
    key = digest(decides)
    return _cached_store(source, encoder, key=key, limit=limit, cache=cache, progress=progress), decides


def cache_folder(cache: Path | None) -> Path:
    """Return the folder for the tokens of large datasets."""
    return cache_base(cache) / "data"


def _cached_store(
    source: Source, encoder: Encoder, *, key: str, limit: int, cache: Path | None, progress: OnProgress | None
) -> TokenStore:
    from filelock import FileLock

    root = cache_folder(cache)
    folder = root / key[:32]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{key[:32]}.lock"):
            facts = _read_facts(folder)
            if facts is None:
                # We hold the lock, so a staged folder is the leftover of a killed process.
                clear_leftovers(root, of=folder.name.__eq__)
                with staging_folder(folder) as staging:
                    store = staging / "store"
                    store.mkdir()
                    facts = _write_store(source, encoder, store, limit=limit, progress=progress)
                    put_in_place(store, folder, aside=staging / "damaged")
    except OSError as error:
        if error.errno not in NO_ROOM | {errno.EACCES, errno.EROFS}:
            raise
        raise UserError(
            f"The tokens of {source.name} cannot be cached in {root}.",
            why=f"{error.strerror}; they need about {source.size_bytes * 3 // 2 >> 20:,} MiB.",
            do="free some space, or set the environment variable CROSSTUNE_CACHE to a folder on a larger disk",
        ) from error
    return open_store(folder, facts)


def _write_store(
    source: Source, encoder: Encoder, folder: Path, *, limit: int, progress: OnProgress | None
) -> dict[str, Any]:
    with DiskFiles(folder) as files:
        facts = encode_source(source, encoder, StoreWriter(files.files), limit=limit, progress=progress)
    write_json(
        folder / MARKER, {"layout": LAYOUT, "source": source.name, "facts": facts, "bytes": files.sizes()}
    )
    return facts


def _read_facts(folder: Path) -> dict[str, Any] | None:
    """Return the facts of a complete store; None when it is missing or damaged."""
    try:
        marker = read_object(folder / MARKER)
        sizes = {name: (folder / f"{name}.bin").stat().st_size for name in ARRAYS}
    except (OSError, UnreadableFile):
        return None
    is_valid = marker.get("layout") == LAYOUT and marker.get("bytes") == sizes
    return dict(marker["facts"]) if is_valid and isinstance(marker.get("facts"), dict) else None


def digest(value: Any) -> str:
    """Return the sha256 of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
