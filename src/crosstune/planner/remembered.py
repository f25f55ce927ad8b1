"""Keep small measured facts in a file of the user's cache, such as the peak memory of finished runs.

The file only improves plans: a damaged, foreign or unwritable one is not an error.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstune.config.load import cache_override
from crosstune.core.errors import UserError
from crosstune.core.json_files import read_json, write_json
from crosstune.core.user_paths import cache_base

FORMAT = 1
MOST_ENTRIES = 500
"""Older entries are removed."""
_LIMIT_BYTES = 4 << 20


def remember(name: str, key: Mapping[str, Any], value: Mapping[str, float]) -> None:
    """Store numbers under a key in the file `name`, replacing those of the same key."""
    entries = recall_all(name)
    entries[digest(key)] = {"key": dict(key), "value": dict(value), "time": time.time()}
    newest = sorted(entries.items(), key=lambda item: item[1]["time"])[-MOST_ENTRIES:]
    try:
        path = _path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"format": FORMAT, "entries": dict(newest)})
    except (OSError, UserError):
        return  # a full or read-only disk, or no home folder: the next plan is not corrected


def recall(name: str, key: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the numbers that were stored under a key."""
    found = recall_all(name).get(digest(key))
    return found["value"] if found is not None else None


def recall_all(name: str) -> dict[str, dict[str, Any]]:
    """Return all valid entries of a file: digest of the key -> key, value and time."""
    try:
        stored = read_json(_path(name), limit=_LIMIT_BYTES)
    except (UserError, OSError):
        return {}
    entries = stored.get("entries")
    if stored.get("format") != FORMAT or not isinstance(entries, dict):
        return {}
    return {digest(entry["key"]): entry for entry in entries.values() if _is_entry(entry)}


def digest(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or {dict} != {type(entry.get(name)) for name in ("key", "value")}:
        return False
    return all(type(number) in (int, float) for number in (entry.get("time"), *entry["value"].values()))


def _path(name: str) -> Path:
    return cache_base(cache_override()) / "measured" / f"{name}.json"
