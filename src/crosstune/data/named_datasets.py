"""The datasets with a short name, generated: `commands` (spoken requests to a smart home, answered with JSON), and
`judge_translations` and `judge_pairs` (translations with counted errors; all translations of a sentence are in one split).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from crosstune.data.read.files import RawRow, Row
from crosstune.files.json_files import read_object

LANGUAGES = ("Spanish", "Italian", "Portuguese")

GRAMMARS: tuple[tuple[str, ...], ...] = (
    ("time", "subject", "verb", "number", "object", "place"),
    ("subject", "verb", "number", "object", "place", "time"),
    ("place", "subject", "verb", "number", "object"),
    ("subject", "verb", "number", "object", "time"),
)
"""The slots of a sentence, in the order that English and the three languages share."""

PENALTIES: Mapping[str, int] = {
    "wrong word": 3,
    "wrong number": 2,
    "missing part": 2,
    "untranslated part": 2,
    "repeated part": 1,
    "wrong order": 1,
    "misspelling": 1,
}
"""Kind of error -> its penalty in points."""
BEST_SCORE = 10
NUM_SENTENCES: Mapping[str, int] = {"train": 1000, "val": 75, "test": 75}
VARIANTS = (0, 1, 2, 4)
"""The number of errors in each translation of a sentence; the last one varies around its number."""
_SEED = 20


@cache
def _phrases() -> dict[str, list[list[str]]]:
    """Return slot -> phrases: English, then one for each language."""
    slots: dict[str, list[list[str]]] = read_object(Path(__file__).with_name("phrases.json"))
    return slots


@dataclass(frozen=True)
class Sentence:
    language: str
    slots: tuple[str, ...]
    choice: tuple[int, ...]

    def words(self, language: str) -> list[str]:
        column = 0 if language == "English" else 1 + LANGUAGES.index(language)
        return [_phrases()[slot][place][column] for slot, place in zip(self.slots, self.choice, strict=True)]


def make_translations(split: str) -> list[dict[str, Any]]:
    """Return the rows of a split: a task, a translation, the reference, a score from 0 to 10, and its errors."""
    rows = []
    for number, sentence in _sentences(split):
        draw = random.Random(f"{_SEED} {split} {number}")
        for variant, num_errors in enumerate(VARIANTS):
            count = num_errors + draw.choice((-1, 0, 1, 2)) if num_errors == VARIANTS[-1] else num_errors
            answer, errors = _translate(sentence, count, draw)
            rows.append(_row(sentence, answer, errors, split=split, number=number, variant=variant))
    return rows


def make_pairs(split: str) -> list[dict[str, Any]]:
    """Return pairs of translations of one sentence; the better one has the higher score."""
    rows = make_translations(split)
    pairs = []
    for start in range(0, len(rows), len(VARIANTS)):
        draw = random.Random(f"{_SEED} pairs {split} {start}")
        group = rows[start : start + len(VARIANTS)]
        draw.shuffle(group)
        for first, second in (group[:2], group[2:]):
            lead = first["score"] - second["score"]
            winner = "A" if lead > 0 else "B" if lead < 0 else "tie"
            request = f"{first['task']}\nA: {first['answer']}\nB: {second['answer']}\nWhich is better?"
            pairs.append(
                {
                    "id": f"{first['id']}+{second['id']}",
                    **{name: first[name] for name in ("group", "task", "reference")},
                    "answer_a": first["answer"],
                    "answer_b": second["answer"],
                    "winner": winner,
                    "messages": _turns(request, winner),
                }
            )
    return pairs


def _sentences(split: str) -> list[tuple[int, Sentence]]:
    """Return the sentences of a split. No sentence is in two splits, not even in a different language."""
    draw = random.Random(_SEED)
    total, seen, found = sum(NUM_SENTENCES.values()), set[Any](), list[Sentence]()
    while len(found) < total:
        slots = draw.choice(GRAMMARS)
        choice = tuple(draw.randrange(len(_phrases()[slot])) for slot in slots)
        if (slots, choice) not in seen:
            seen.add((slots, choice))
            found.append(Sentence(draw.choice(LANGUAGES), slots, choice))
    names = list(NUM_SENTENCES)
    start = sum(NUM_SENTENCES[name] for name in names[: names.index(split)])
    return list(enumerate(found[start : start + NUM_SENTENCES[split]], start=start))


def _translate(sentence: Sentence, num_errors: int, draw: random.Random) -> tuple[str, list[tuple[str, str]]]:
    """Return a translation with errors in different parts, and each error with the part it is in."""
    parts: list[str] = sentence.words(sentence.language)
    errors: list[tuple[str, str]] = []
    free = list(range(len(parts)))
    draw.shuffle(free)
    swaps: list[int] = []
    for place in free[:num_errors]:
        kinds = [kind for kind in PENALTIES if _is_possible(kind, sentence, place, errors, swaps, free)]
        kind = draw.choice(kinds)
        right = parts[place]
        if kind == "wrong order":
            swaps.append(place)
        elif kind == "missing part":
            parts[place] = ""
        elif kind == "untranslated part":
            parts[place] = sentence.words("English")[place]
        elif kind == "repeated part":
            parts[place] = f"{right} {right}"
        elif kind == "misspelling":
            parts[place] = _misspelled(right, draw)
        else:
            phrases = _phrases()[sentence.slots[place]]
            others = [phrase for number, phrase in enumerate(phrases) if number != sentence.choice[place]]
            parts[place] = draw.choice(others)[1 + LANGUAGES.index(sentence.language)]
        errors.append((kind, right))
    for place in swaps:
        parts[place], parts[place + 1] = parts[place + 1], parts[place]
    text = " ".join(part for part in parts if part)
    return f"{text[:1].upper()}{text[1:]}.", errors


def _is_possible(
    kind: str,
    sentence: Sentence,
    place: int,
    errors: Sequence[tuple[str, str]],
    swaps: Sequence[int],
    free: Sequence[int],
) -> bool:
    slot = sentence.slots[place]
    if swaps and place in (swaps[0], swaps[0] + 1):
        return kind == "misspelling"
    if kind == "wrong number":
        return slot == "number"
    if kind == "wrong word":
        return slot != "number"
    if kind == "wrong order":
        # At most one, of two parts without another error: otherwise the errors could not be told apart.
        others = free[: len(errors)]
        return not swaps and place + 1 < len(sentence.slots) and not {place, place + 1} & set(others)
    return not (kind == "missing part" and sum(each == kind for each, _ in errors) >= 2)


def _misspelled(text: str, draw: random.Random) -> str:
    """Exchange two different letters that follow each other."""
    pairs = [text[place : place + 2] for place in range(len(text) - 1)]
    place = draw.choice([place for place, pair in enumerate(pairs) if pair.isalpha() and pair[0] != pair[1]])
    return f"{text[:place]}{text[place + 1]}{text[place]}{text[place + 2 :]}"


def _row(
    sentence: Sentence,
    answer: str,
    errors: Sequence[tuple[str, str]],
    *,
    split: str,
    number: int,
    variant: int,
) -> dict[str, Any]:
    source, reference = (" ".join(sentence.words(name)) for name in ("English", sentence.language))
    source, reference = (f"{text[:1].upper()}{text[1:]}." for text in (source, reference))
    score = max(0, BEST_SCORE - sum(PENALTIES[kind] for kind, _ in errors))
    issues = [f"{kind} ({part})" for kind, part in errors]
    critique = (
        "The translation is right." if not errors else f"It has {len(errors)} error{'s' * (len(errors) > 1)}."
    )
    task = f"Translate into {sentence.language}: {source}"
    request = f"Rate this translation from 0 to {BEST_SCORE}.\n{task}\nReference: {reference}\nTranslation: {answer}"
    verdict = f"Score: {score}/{BEST_SCORE}\nIssues: {'; '.join(issues) or 'none'}\nFeedback: {critique}"
    return {
        "id": f"{split}-{number}-{variant}",
        "group": source,
        "task": task,
        "answer": answer,
        "reference": reference,
        "score": score,
        "issues": issues,
        "critique": critique,
        "source": source,
        "translation": answer,
        "messages": _turns(request, verdict),
    }


def _turns(request: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]


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
