"""Where rows come from: a bundled name, or a JSON or JSONL file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.core.names import nearest
from crosstune.data.commands import make_commands

Row = dict[str, Any]

BUNDLED = {"commands": make_commands}
SUFFIXES = (".jsonl", ".json")


def read_rows(name: str, *, split: str = "train") -> list[Row]:
    """The rows of a data set. `split` picks a part of a bundled one; a file has one part."""
    if name in BUNDLED:
        return BUNDLED[name](split)
    path = Path(name).expanduser()
    if path.is_file():
        rows = _read_file(path)
        if not rows:
            raise UserError(f"The data set {path} is empty.", do="give it at least one row")
        return rows
    if path.is_dir():
        raise UserError(f"{path} is a folder.", do="name one .json or .jsonl file in it")
    raise _unknown(name)


def _unknown(name: str) -> UserError:
    close = nearest(name, BUNDLED)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return UserError(
        f"There is no data set '{name}'.",
        why="it is neither a bundled name nor a file here.",
        do=f"{hint}Give the path of a .json or .jsonl file, or a bundled name: {', '.join(BUNDLED)}.",
    )


def _read_file(path: Path) -> list[Row]:
    if path.suffix not in SUFFIXES:
        raise UserError(
            f"{path} is not a kind of file that can be read.",
            do=f"use one that ends in {' or '.join(SUFFIXES)}",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Cannot read the data set {path}.", why=str(error)) from error
    return _parse_lines(path, text) if path.suffix == ".jsonl" else _parse_array(path, text)


def _parse_lines(path: Path, text: str) -> list[Row]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number} is not JSON.", why=str(error)) from error
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number} is not a row.", why="each line must be a JSON object.")
        rows.append(row)
    return rows


def _parse_array(path: Path, text: str) -> list[Row]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UserError(
            f"{path} is not JSON.", why=str(error), do="lines of JSON belong in a .jsonl file"
        ) from error
    if not isinstance(data, list) or not all(isinstance(row, dict) for row in data):
        raise UserError(f"{path} is not a list of rows.", why="it must be a JSON array of objects.")
    return data
