"""Read JSON and JSON Lines strictly, and write them; convert values to JSON types."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError, shown
from crosstune.core.safe_text import printable_json
from crosstune.files.atomic_files import write_text
from crosstune.files.plain_files import MissingFile, UnreadableFile, not_utf8, open_plain, read_plain

JSON_LIMIT = 64 << 20
"""The largest JSON file in bytes, unless a reader sets a different limit."""
LINE_LIMIT = 16 << 20
"""The largest first line of a file that may be JSON Lines."""
DEPTH_LIMIT = 64
_DIGITS_LIMIT = 40
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def write_json(path: Path, data: Any) -> None:
    """Write an indented JSON file atomically; NaN and infinities become null."""
    write_text(path, to_json(data, indent=2) + "\n")


def to_json(data: Any, *, indent: int | None = None) -> str:
    """Return the JSON text of a value, with control characters and halves of surrogate pairs escaped."""
    return printable_json(json.dumps(finite(data), indent=indent, ensure_ascii=False, allow_nan=False))


def read_json(path: Path, *, foreign: bool = False, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if the file does not exist."""
    try:
        return read_object(path, foreign=foreign, limit=limit)
    except MissingFile:
        return {}


def read_object(path: Path, *, foreign: bool = False, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """Return the object in a JSON file; `foreign` is passed to `parse_json`."""
    return object_of(read_plain(path, limit=limit), path, foreign=foreign)


def object_of(raw: bytes, path: Path, *, foreign: bool = False) -> dict[str, Any]:
    """Return the object in the contents of a JSON file."""
    try:
        found = parse_json(raw, foreign=foreign)
    except ValueError as error:
        raise UnreadableFile(path, f"it is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise UnreadableFile(path, "it does not contain a JSON object")
    return found


def parse_json(raw: bytes | str, *, foreign: bool = False) -> Any:
    """Parse JSON; raise ValueError when it is invalid, nested too deeply, or has overlong numbers.

    `foreign` files, of other tools, may repeat keys and contain NaN, but no unpaired surrogate.
    """
    try:
        text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
        value = (FOREIGN if foreign else _STRICT).decode(text)
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(error)) from error
    except RecursionError as error:
        raise ValueError(f"it is nested deeper than {DEPTH_LIMIT} levels") from error
    check_parsed(value, text, foreign=foreign)
    return value


def check_parsed(value: Any, text: str, *, foreign: bool) -> None:
    """Raise ValueError when the value of a JSON text is nested too deeply or, in a foreign file, cannot be encoded."""
    if text.count("[") + text.count("{") > DEPTH_LIMIT:
        _check_depth(value)
    if foreign and _SURROGATE.search(text):
        _check_characters(value)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON Lines file of a run; none if it does not exist. Skip a truncated last line and lines
    without an object; raise a UserError for any other bad line."""
    rows: list[dict[str, Any]] = []
    try:
        file = open_plain(path)
    except MissingFile:
        return rows
    with file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    break
                raise UserError(f"{path}, line {number} is not JSON.", why=str(error)) from error
            if isinstance(row, dict):
                rows.append(row)
    return rows


def finite(value: Any) -> Any:
    """Return the value in JSON types: NaN and infinities as null, paths as strings, sets and tuples as lists,
    numpy's numbers as Python numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [finite(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):  # a scalar or an array
        return finite(value.tolist())
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{shown(twice)} occurs twice")
    return found


def _short_integer(text: str) -> int:
    """Parse an integer; longer integers overflow the floats and sizes they are used as."""
    if len(text) > _DIGITS_LIMIT:
        raise ValueError(f"a number has {len(text):,} digits")
    return int(text)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEPTH_LIMIT):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {DEPTH_LIMIT} levels")


def _check_characters(value: Any) -> None:
    """Raise ValueError for half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("it contains an unpaired surrogate") from error


FOREIGN = json.JSONDecoder(parse_int=_short_integer)
"""The decoder of foreign files, for readers that parse value by value."""
_STRICT = json.JSONDecoder(
    parse_int=_short_integer, parse_constant=_no_constant, object_pairs_hook=_unique_keys
)
