"""Write a program's in-memory rows to JSON Lines files in the cache, named by their contents.

A run on them is a run on a file: it has the same tokens, identity and order, and can be planned, resumed and moved.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.data.tokens.encode import cache_folder
from crosstune.files.atomic_files import put_in_place, staging_folder
from crosstune.files.plain_files import disk_full_reason, room_advice

_NAME_CHARS = 16
_SHAPES = (
    "pass a list of rows, each a dict with the columns of a data file; a datasets.Dataset or DatasetDict; or the path or "
    "name of a dataset. Convert other types with list(rows), list(rows.take(1000)) for a streamed dataset, "
    "frame.to_dict('records') for a data frame, or datasets.Dataset.from_dict(columns)"
)


def write_in_memory(data: object, *, option: str) -> Path:
    """Write a list of rows, a `datasets.Dataset`, or a mapping from splits to either; return the file or the folder."""
    root = cache_folder()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with staging_folder(root / "rows") as staging:
            if isinstance(data, Mapping):
                return _write_splits(data, root, staging, option=option)
            found = staging / "rows.jsonl"
            digest = _write(_check_rows(data, option=option), found, option=option)
            target = root / f"rows-{digest[:_NAME_CHARS]}.jsonl"
            put_in_place(found, target, aside=staging / "old")
            return target
    except OSError as error:
        raise UserError(
            f"The rows of {option} cannot be written to {root}.",
            why=str(error),
            do=room_advice(disk_full_reason(error), "set CROSSTUNE_CACHE to a folder that can be written"),
        ) from error


def name_in_memory(text: str) -> str:
    """Return a text in which paths of in-memory rows are replaced by `rows in memory`."""
    if "rows-" not in text:
        return text
    written = re.escape(str(cache_folder())) + rf"[/\\]rows-[0-9a-f]{{{_NAME_CHARS}}}(\.jsonl)?"
    return re.sub(written, "rows in memory", text)


def _write_splits(splits: Mapping[Any, Any], root: Path, staging: Path, *, option: str) -> Path:
    """Write each split to a file named after it, as in a folder of data files."""
    folder, digest = staging / "splits", hashlib.sha256()
    folder.mkdir()
    for name, data in splits.items():
        # A dict of columns has values that are not rows.
        is_split = _are_rows(data) and isinstance(next(iter(data), {}), Mapping)
        if not isinstance(name, str) or not name.isidentifier() or not is_split:
            raise _unsupported(splits, option=option)
        written = _write(_check_rows(data, option=option), folder / f"{name}.jsonl", option=option)
        digest.update(f"{name}\0{written}\0".encode())
    target = root / f"rows-{digest.hexdigest()[:_NAME_CHARS]}"
    put_in_place(folder, target, aside=staging / "old")
    return target


def _write(rows: Iterable[Any], path: Path, *, option: str) -> str:
    """Write a row per line and return the sha256 of the file."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for number, row in enumerate(rows, start=1):
            line = _to_json(row, f"Row {number} of {option}").encode() + b"\n"
            digest.update(line)
            file.write(line)
    return digest.hexdigest()


def _to_json(row: Any, place: str) -> str:
    if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
        raise UserError(
            f"{place} is not a row.",
            why=f"it is {row!r:.60}.",
            do="a row is a dict with the columns of a data file, such as {'prompt': ..., 'completion': ...}",
        )
    try:
        return json.dumps(dict(row), default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{place} cannot be written as JSON.",
            why=f"{error}.",
            do="use strings, numbers, lists and dicts; remove columns with other values, such as images",
        ) from error


def _plain(value: Any) -> Any:
    """Return a value in JSON types: the contents of arrays and tensors, the ISO form of dates, mappings as dicts."""
    if isinstance(value, Mapping):
        return dict(value)
    for method in ("tolist", "isoformat"):
        if callable(convert := getattr(value, method, None)):
            return convert()
    raise TypeError(f"a column contains a {type(value).__module__}.{type(value).__qualname__}")


def _are_rows(data: object) -> bool:
    """Return True for a sequence or a `datasets.Dataset`: it has a length and can be read again."""
    if isinstance(data, Sequence):
        return not isinstance(data, (str, bytes))
    return isinstance(getattr(data, "column_names", None), list) and hasattr(data, "__len__")


def _check_rows(data: Any, *, option: str) -> Iterable[Any]:
    if not _are_rows(data):
        raise _unsupported(data, option=option)
    if not len(data):
        raise UserError(f"{option} has no rows.", do=_SHAPES)
    return data


def _unsupported(data: object, *, option: str) -> UserError:
    kind = f"{type(data).__module__}.{type(data).__qualname__}".removeprefix("builtins.")
    return UserError(f"{option} cannot be used as a dataset.", why=f"it is a {kind}.", do=_SHAPES)
