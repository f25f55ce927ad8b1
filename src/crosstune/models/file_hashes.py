"""Hash files and check the SHA256SUMS of a folder; a hash is cached until the file's size, timestamps or inode change."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from crosstune.config.load import cache_base
from crosstune.core.errors import UserError
from crosstune.files.atomic_files import staged_file
from crosstune.files.json_files import read_json
from crosstune.files.plain_files import UnreadableFile, open_plain, read_plain_text

SUMS = "SHA256SUMS"
_LINE = re.compile(r"(?P<sha>[0-9a-f]{64})  (?P<name>\S.*)")
_SUMS_LIMIT = 4 * 2**20
NUM_THREADS = 4
_BLOCK_BYTES = 4 * 2**20
_SETTLED_S = 2.0
"""A file changed this recently is hashed again: a later change may fall into the same tick of the file system's clock."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_known: dict[str, Mapping[str, Any]] = {}
"""Hashes of this process, by path, each with the stamp of its file."""


def sha256_of(path: Path, *, on_bytes: Callable[[int], None] = lambda count: None) -> str:
    """Return the sha256 of all bytes of a file, from the cache if the file has not changed since it was hashed.

    `on_bytes` is called with the number of bytes read since its last call.
    """
    key = str(path.resolve())
    stamp = _stamp(path)
    for known in (_known.get(key), _read_cached(key)):
        if known and known.get("path") == key and known.get("stamp") == stamp:
            _known[key] = known
            return str(known["sha256"])
    digest = _hash(path, on_bytes)
    settled = time.time() - max(stamp["mtime_ns"], stamp["ctime_ns"]) / 1e9 > _SETTLED_S
    if settled and _stamp(path) == stamp:
        _known[key] = {"path": key, "stamp": stamp, "sha256": digest}
        with contextlib.suppress(OSError, UserError):  # without a cache, the next process hashes again
            _cache_file(key).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with staged_file(_cache_file(key)) as staged:
                staged.touch(mode=0o600)  # an entry that others may write is ignored
                staged.write_text(json.dumps(_known[key]))
    return digest


def sha256_of_all(
    paths: Sequence[Path], *, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[Path, str]:
    """Return the sha256 of each file, several at a time; `progress` is called with the bytes read and their total."""
    total, done = sum(path.stat().st_size for path in paths), 0

    def add(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    with ThreadPoolExecutor(max_workers=min(NUM_THREADS, len(paths)) or 1) as pool:
        return dict(zip(paths, pool.map(lambda path: sha256_of(path, on_bytes=add), paths), strict=True))


def write_checksums(folder: Path) -> None:
    """Write the hashes of all files of a result."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    hashes = sha256_of_all(paths)
    lines = [f"{hashes[path]}  {path.relative_to(folder).as_posix()}\n" for path in paths]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def check_checksums(folder: Path) -> None:
    """Raise a UserError if a file of a result is missing or was changed.

    Folders of other tools have no hashes; files added later are not checked.
    """
    sums = folder / SUMS
    if not sums.is_file():
        return
    wanted = _read_sums(sums)
    found = sha256_of_all([folder / name for name in wanted if (folder / name).is_file()])
    for name, sha in wanted.items():
        if (folder / name) not in found:
            raise _damaged(folder, f"{name} is missing")
        if found[folder / name] != sha:
            raise _damaged(folder, f"{name} has changed since it was written")


def _hash(path: Path, on_bytes: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with open_plain(path) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            on_bytes(len(block))
    return digest.hexdigest()


def _stamp(path: Path) -> dict[str, int]:
    """Return the attributes that change with a file. Unlike the modification time, the change time cannot be set."""
    found = path.stat()
    return {
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
        "inode": found.st_ino,
        "device": found.st_dev,
    }


def _read_cached(key: str) -> Mapping[str, Any]:
    """Return the cache entry of a file; empty unless only this user can have written it."""
    try:
        found = _cache_file(key).stat()
        if hasattr(os, "geteuid") and (found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE):
            return {}
        entry = read_json(_cache_file(key))
    except (UserError, OSError):
        return {}
    return entry if isinstance(entry.get("sha256"), str) else {}


def _cache_file(key: str) -> Path:
    name = f"{hashlib.sha256(key.encode(errors='surrogateescape')).hexdigest()[:32]}.json"
    return cache_base() / "hashes" / name


def _read_sums(path: Path) -> dict[str, str]:
    try:
        lines = read_plain_text(path, limit=_SUMS_LIMIT).splitlines()
    except UnreadableFile as error:
        raise _damaged(path.parent, f"{SUMS} cannot be read: {error.why.rstrip('.')}") from error
    wanted = {}
    for number, line in enumerate(lines, start=1):
        found = _LINE.fullmatch(line)
        if found is None or found["name"].startswith("/") or ".." in found["name"].split("/"):
            raise _damaged(path.parent, f"line {number} of {SUMS} is not a hash and a file name")
        wanted[found["name"]] = found["sha"]
    return wanted


def _damaged(folder: Path, why: str) -> UserError:
    return UserError(
        f"{folder} is damaged or was changed.",
        why=f"{why}.",
        do=f"restore it from a copy or write it again; if you changed it on purpose, remove {folder / SUMS}",
    )
