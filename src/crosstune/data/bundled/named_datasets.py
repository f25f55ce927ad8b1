"""List the datasets with a short name: bundled, generated, and some from the hub."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from crosstune.data.bundled.commands import make_commands
from crosstune.data.bundled.translations import make_pairs, make_translations
from crosstune.data.read.files import RawRow, Row

DUMMY = "dummy"
DEFAULT_SAMPLES = 512
"""The default number of rows of `dummy` and `alpaca_sample`."""


@dataclass(frozen=True, kw_only=True)
class HubName:
    """A hub dataset, the format of its rows, and the default number of rows (-1 for all)."""

    repo: str
    form: str
    samples: int = -1


Rows = Callable[[str], list[dict[str, Any]]]
"""Returns the rows of a split."""

JUDGED: dict[str, Rows] = {"judge_translations": make_translations, "judge_pairs": make_pairs}
"""Bundled data for the judge recipe, with the splits train, val and test."""
BUNDLED: dict[str, Rows] = {"commands": make_commands, **JUDGED}
HUB_NAMES = {
    "alpaca": HubName(repo="yahma/alpaca-cleaned", form="alpaca"),
    "alpaca_sample": HubName(repo="yahma/alpaca-cleaned", form="alpaca", samples=DEFAULT_SAMPLES),
    "guanaco": HubName(repo="timdettmers/openassistant-guanaco", form="guanaco"),
    "sql": HubName(repo="knowrohit07/know_sql", form="question_answer"),
    "orca_math": HubName(repo="microsoft/orca-math-word-problems-200k", form="question_answer"),
}


def known_names() -> list[str]:
    return sorted([*BUNDLED, *HUB_NAMES, DUMMY])


@dataclass(frozen=True, kw_only=True)
class RowsPart:
    """Rows that are already in memory."""

    name: str
    loaded: list[Row]
    form: str = "auto"

    @property
    def size_bytes(self) -> int:
        return sum(len(repr(row)) for row in self.loaded)

    def place(self, number: int) -> str:
        return f"Row {number} of {self.name}"

    def digest(self) -> str:
        return hashlib.sha256(repr(self.loaded).encode()).hexdigest()

    def rows(self) -> Iterator[RawRow]:
        for number, row in enumerate(self.loaded, start=1):
            yield RawRow(row, number, 0)
