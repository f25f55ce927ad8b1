"""Collect the answers to the same prompts at several evaluations, beside their references."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from crosstune.core.control_characters import printable
from crosstune.core.events import Evaluated
from crosstune.report.differences import Piece, changed_pieces
from crosstune.report.files import RunFiles, mapping
from crosstune.report.series import evaluation_step
from crosstune.report.turning_points import Best, best_evaluation

METRIC = "exact_match"
MOST_DURING = 2
"""Most evaluations shown between `before` and `after`."""
MOST_PROMPTS = 40
MOST_CHARACTERS = 6000
MOST_FRAMES = 200

Key = tuple[str, int]
"""A prompt and its index among equal prompts of one evaluation."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    text: str | None
    """None when this evaluation did not include the prompt."""
    mark: str = ""
    """`match`, `no match`, or empty when the answer is not compared with a reference."""
    hint: str = ""
    frames: list[str] = field(default_factory=list)
    """The states of the answer while it was generated, the last one its text."""
    pieces: list[Piece] = field(default_factory=list)
    """The text, with the words marked that the answer of the column before lacks; in the first column, those that the
    next one lacks."""
    is_same: bool = False
    """Whether it equals the answer of the column before."""


@dataclass(frozen=True, kw_only=True)
class SampleRow:
    prompt: str
    reference: str
    answers: list[Answer]


@dataclass(frozen=True, kw_only=True)
class SampleColumn:
    title: str
    num_matches: int
    num_compared: int


@dataclass(frozen=True, kw_only=True)
class Samples:
    columns: list[SampleColumn]
    rows: list[SampleRow]
    num_prompts: int
    num_moments: int


def collect_samples(run: RunFiles) -> Samples:
    recorded = [event for event in run.events_of(Evaluated) if isinstance(event.get("samples"), list)]
    recorded = [event for event in recorded if event["samples"]]
    best = best_evaluation(run)
    moments = _choose(recorded, best=best, run=run)
    tables = [dict(_keyed(event["samples"])) for event in moments]
    # Free text matches no reference exactly: answers are compared where that is the metric.
    compares = [METRIC in mapping(event.get("metrics")) for event in moments]
    keys = list(dict.fromkeys(key for table in tables for key in table))
    rows = [_row(key, tables, compares) for key in keys]
    columns = []
    for index, event in enumerate(moments):
        marks = Counter(row.answers[index].mark for row in rows)
        compared = marks["match"] + marks["no match"]
        columns.append(
            SampleColumn(title=_title(event, run, best), num_matches=marks["match"], num_compared=compared)
        )
    return Samples(
        columns=columns, rows=rows[:MOST_PROMPTS], num_prompts=len(rows), num_moments=len(recorded)
    )


def _choose(
    recorded: Sequence[Mapping[str, Any]], *, best: Best | None, run: RunFiles
) -> list[Mapping[str, Any]]:
    """Return the evaluation before training, the best one, a few evenly spaced ones during it, and the one after."""
    before = [event for event in recorded if event.get("when") == "before"][-1:]
    after = [event for event in recorded if event.get("when") == "after"][-1:]
    during = [event for event in recorded if event.get("when") not in ("before", "after")]
    if len(during) > MOST_DURING:
        if after:
            places = [(index + 1) * len(during) // (MOST_DURING + 1) for index in range(MOST_DURING)]
        else:
            places = [len(during) // 2, len(during) - 1]
        kept = [during[place] for place in places]
        lowest = [event for event in during if best and evaluation_step(event, run) == best.step]
        if lowest and lowest[0] not in kept:
            kept[0] = lowest[0]  # the result may have its weights
        during = sorted(kept, key=lambda event: evaluation_step(event, run))
    return [*before, *during, *after]


def _keyed(samples: Sequence[Any]) -> Iterator[tuple[Key, Mapping[str, Any]]]:
    seen: Counter[str] = Counter()
    for sample in map(mapping, samples):
        prompt = str(sample.get("prompt", ""))
        yield (prompt, seen[prompt]), sample
        seen[prompt] += 1


def _title(event: Mapping[str, Any], run: RunFiles, best: Best | None) -> str:
    when, step = str(event.get("when", "")), evaluation_step(event, run)
    title = when if when in ("before", "after") else f"step {step:,.0f}"
    is_best = best is not None and step == best.step and when != "before"
    return f"{title}, the best" if is_best else title


def _row(key: Key, tables: Sequence[Mapping[Key, Mapping[str, Any]]], compares: Sequence[bool]) -> SampleRow:
    reference = next(
        (str(table[key]["reference"]) for table in tables if table.get(key, {}).get("reference")), ""
    )
    answers = []
    for table, compared in zip(tables, compares, strict=True):
        answer = str(table[key].get("answer", "")) if key in table else None
        found = _answer(answer, reference if compared else "")
        answers.append(replace(found, frames=_frames(table.get(key, {}).get("frames"))))
    return SampleRow(prompt=_cut(key[0]), reference=_cut(reference), answers=compare_answers(answers))


def compare_answers(answers: Sequence[Answer]) -> list[Answer]:
    """Mark in each answer what the one before it lacks, and in the first one what the next lacks."""
    found = []
    for place, answer in enumerate(answers):
        others = [*answers[:place][::-1], *answers[place + 1 :]]
        other = next((each for each in others if each.text is not None), None)
        if not answer.text:
            found.append(answer)
        elif other is None:
            found.append(replace(answer, pieces=[Piece(answer.text, False)]))
        else:
            pieces = changed_pieces(answer.text, other.text or "")
            same = place > 0 and other.text == answer.text
            found.append(replace(answer, pieces=pieces, is_same=same))
    return found


def _answer(answer: str | None, reference: str) -> Answer:
    if answer is None:
        return Answer(text=None)
    if not reference:
        return Answer(text=_cut(answer))
    if answer == reference:
        return Answer(text=_cut(answer), mark="match")
    same_words = answer.split() == reference.split()
    return Answer(text=_cut(answer), mark="no match", hint="only spacing differs" if same_words else "")


def _frames(recorded: Any) -> list[str]:
    return (
        [_cut(printable(str(frame))) for frame in recorded[:MOST_FRAMES]]
        if isinstance(recorded, list)
        else []
    )


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}… [{len(text) - MOST_CHARACTERS:,} more characters]"
