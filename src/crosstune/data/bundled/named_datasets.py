"""List the datasets with a short name, and generate `commands`: spoken requests to a smart home, answered with JSON."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from crosstune.data.bundled.translations import make_pairs, make_translations
from crosstune.data.read.files import RawRow, Row

DEVICES = ("lamp", "heater", "fan", "speaker", "coffee maker", "humidifier", "screen")
ROOMS = ("kitchen", "bedroom", "office", "garage", "hallway", "living room", "attic", "bathroom")
REQUESTS = {
    "start": (
        "Switch on the {device} in the {room} for {value} minutes.",
        "I want the {room} {device} to run for {value} minutes.",
        "Please start the {device} in the {room}, {value} minutes will do.",
    ),
    "stop": (
        "Turn off the {room} {device} in {value} minutes.",
        "After {value} minutes, shut down the {device} in the {room}.",
        "The {device} in the {room} should be off {value} minutes from now.",
    ),
    "set": (
        "Set the {room} {device} to {value} percent.",
        "I would like the {device} in the {room} at {value} percent.",
        "Bring the {room} {device} to a level of {value}.",
    ),
    "raise": (
        "Turn up the {device} in the {room} by {value} percent.",
        "Give me {value} percent more from the {room} {device}.",
        "The {room} {device} could be stronger, add {value} percent.",
    ),
    "lower": (
        "Turn down the {room} {device} by {value} percent.",
        "Take {value} percent off the {device} in the {room}.",
        "The {device} in the {room} is too much, reduce it by {value} percent.",
    ),
}
NUM_TRAIN = 384
NUM_HELD_OUT = 64


def is_held_out(device: str, room: str) -> bool:
    return (DEVICES.index(device) + 2 * ROOMS.index(room)) % 5 == 0


def make_commands(split: str, *, seed: int = 7) -> list[dict[str, Any]]:
    """Return the rows of a split (train or test) as chat messages, always the same for the same seed."""
    held_out = split == "test"
    rng = random.Random(f"{seed}-{split}")
    pairs = [(d, r) for d in DEVICES for r in ROOMS if is_held_out(d, r) == held_out]
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    while len(rows) < (NUM_HELD_OUT if held_out else NUM_TRAIN):
        device, room = rng.choice(pairs)
        action = rng.choice(tuple(REQUESTS))
        value = rng.randrange(5, 100, 5)
        request = rng.choice(REQUESTS[action]).format(device=device, room=room, value=value)
        if request in seen:
            continue
        seen.add(request)
        command = {"action": action, "device": device, "room": room, "value": value}
        answer = json.dumps(command, separators=(",", ":"))
        rows.append(
            {"messages": [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]}
        )
    return rows


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
