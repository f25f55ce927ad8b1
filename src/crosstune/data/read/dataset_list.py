"""Parse --dataset: one source, or several, with or without weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from crosstune.core.errors import UserError
from crosstune.data.read.sources import is_known

MIN_WEIGHT = 1e-6
"""Weights are between this and its inverse."""


@dataclass(frozen=True, kw_only=True)
class DatasetEntry:
    """A source and its weight in the mixture."""

    name: str
    weight: float | None = None

    def text(self) -> str:
        return self.name if self.weight is None else f"{self.name}:{self.weight:g}"


def parse_dataset(text: str) -> list[DatasetEntry]:
    """Parse `a.jsonl`, `a.jsonl,b.jsonl` or `a.jsonl:0.7,b.jsonl:0.3`. Existing paths may contain commas and colons."""
    pieces = text.split(",")
    entries: list[DatasetEntry] = []
    while pieces:
        length = _longest_name(pieces)
        entries.append(_entry(",".join(pieces[:length])))
        pieces = pieces[length:]
    _check_weights(entries, text)
    return entries


def unweighted(text: str, *, option: str) -> list[DatasetEntry]:
    """Parse a list of sources; raise a UserError if one has a weight."""
    entries = parse_dataset(text)
    if weighted := [entry for entry in entries if entry.weight is not None]:
        raise UserError(
            f"--{option} does not accept weights, but {weighted[0].name} has a weight.",
            why="all of its rows are read once.",
            do=f"use --{option} {','.join(entry.name for entry in entries)}",
        )
    return entries


def join_entries(entries: Sequence[DatasetEntry]) -> str:
    return ",".join(entry.text() for entry in entries)


def _longest_name(pieces: Sequence[str]) -> int:
    """Return the number of pieces that form an existing path, with or without a weight; 1 if none do."""
    for length in range(len(pieces), 1, -1):
        name = ",".join(pieces[:length]).strip()
        front, _, end = name.rpartition(":")
        if _exists(name) or (_exists(front) and _is_number(end)):
            return length
    return 1


def _entry(text: str) -> DatasetEntry:
    name = text.strip()
    front, _, end = name.rpartition(":")
    if _exists(name) or not front or not (_is_number(end) or _exists(front)):
        return DatasetEntry(name=name)  # such as C:\\data\\a.jsonl
    if not _is_number(end) or not MIN_WEIGHT <= float(end) <= 1 / MIN_WEIGHT:
        raise UserError(
            f"The weight of {front} in --dataset cannot be '{end}'.",
            do=f"use a number from {MIN_WEIGHT:g} to {1 / MIN_WEIGHT:g}, as in --dataset {front}:0.7,OTHER:0.3",
        )
    return DatasetEntry(name=front, weight=float(end))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_weights(entries: Sequence[DatasetEntry], text: str) -> None:
    names = [entry.name for entry in entries]
    if len(entries) > 1 and not all(names):
        raise UserError(f"The dataset '{text}' contains an empty name.", do="remove a comma")
    missing = [entry.name for entry in entries if entry.weight is None]
    if missing and len(missing) < len(entries):
        raise UserError(
            f"{', '.join(missing)} in --dataset has no weight, but others do.",
            do="specify a weight for every source, or for none",
        )
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"--dataset lists {twice[0]} twice.",
            do="list it once, with a larger weight if it should count more",
        )


def _exists(name: str) -> bool:
    if not name or is_known(name):
        return bool(name)
    try:
        return Path(name).expanduser().exists()
    except OSError:  # a list of several sources may be longer than a path can be
        return False
