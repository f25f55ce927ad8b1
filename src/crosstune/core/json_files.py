"""Read and write JSON and JSON Lines files; convert values that JSON does not have."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstune.core.atomic_files import write_text
from crosstune.core.errors import UserError


def write_json(path: Path, data: Any) -> None:
    """Write an indented JSON file atomically; NaN and infinities become null."""
    write_text(path, json.dumps(finite(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if the file does not exist."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON.", why=str(error), do="restore it from a copy") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no JSON object.", do="restore it from a copy")
    return found


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON Lines file. A truncated last line is left out; any other bad line is an error."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise UserError(f"{path}, line {number} is not JSON.", why=str(error)) from error
    return rows


def finite(value: Any) -> Any:
    """Return the value in JSON's types: NaN and infinities as null, paths as strings, sets and tuples as lists,
    numpy's numbers as plain ones."""
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


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object from pairs, as an `object_pairs_hook`; raise ValueError when a key occurs twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} occurs twice")
    return found
