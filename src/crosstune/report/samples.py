"""Collect the answers to the same prompts at several evaluations, and mark the changed words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from crosstune.core.events import Evaluated
from crosstune.core.safe_text import printable
from crosstune.report.files import RunFiles, listed, mapping, number
from crosstune.report.formatting import show_number
from crosstune.report.series import Best, best_evaluation, evaluation_step

METRIC = "exact_match"
MAX_DURING = 2
"""Maximum number of evaluations shown between `before` and `after`."""
MAX_PROMPTS = 40
MAX_CHARACTERS = 6000
MAX_FRAMES = 200
MAX_PICTURES = 16
_PICTURE = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/=]{1,65536}")
MAX_WORDS = 600
"""Longer texts are not compared: the time is quadratic."""
_WORDS = re.compile(r"\s+|\w+|[^\w\s]")

Key = tuple[str, int]
"""A prompt and its index among equal prompts of one evaluation."""


class Piece(NamedTuple):
    text: str
    changed: bool


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer at one evaluation, with its differences."""

    text: str | None
    """None when this evaluation did not include the prompt."""
    score: str = ""
    """The reward, if there is one."""
    mark: str = ""
    """`match`, `no match`, or empty if it was not compared with a reference."""
    frames: list[str] = field(default_factory=list)
    """States of the answer during its generation; the last is its text."""
    pieces: list[Piece] = field(default_factory=list)
    """The text with changed words marked: against the previous column, or the next for the first column."""
    is_same: bool = False
    """True if it equals the answer in the previous column."""


@dataclass(frozen=True, kw_only=True)
class SampleRow:
    prompt: str
    reference: str
    answers: list[Answer]
    pictures: list[str] = field(default_factory=list)
    """Data URIs."""


class SampleColumn(NamedTuple):
    title: str
    num_matches: int
    num_compared: int


@dataclass(frozen=True, kw_only=True)
class Samples:
    columns: list[SampleColumn]
    rows: list[SampleRow]
    num_prompts: int
    num_moments: int
    result: int = -1
    """Index of the column with the weights of the result."""


def collect_samples(run: RunFiles) -> Samples:
    recorded = [event for event in run.events_of(Evaluated) if listed(event.get("samples"))]
    best = best_evaluation(run)
    moments = _choose(recorded, best=best, run=run)
    tables = [dict(_keyed(event["samples"])) for event in moments]
    # Free text never matches a reference exactly: compare answers only where exact match is measured.
    compares = [METRIC in mapping(event.get("metrics")) for event in moments]
    keys = list(dict.fromkeys(key for table in tables for key in table))
    rows = [_row(key, tables, compares) for key in keys]
    columns = []
    for index, event in enumerate(moments):
        marks = Counter(row.answers[index].mark for row in rows)
        compared = marks["match"] + marks["no match"]
        columns.append(SampleColumn(_title(event, run, best), marks["match"], compared))
    kept = [place for place, event in enumerate(moments) if _is_result(event, run)]
    return Samples(
        columns=columns,
        rows=rows[:MAX_PROMPTS],
        num_prompts=len(rows),
        num_moments=len(recorded),
        result=kept[-1] if kept else -1,
    )


def _is_result(event: Mapping[str, Any], run: RunFiles) -> bool:
    """Return True if the result has the weights of this evaluation, and not the last weights."""
    step, kept = evaluation_step(event, run), run.summary.get("result_step")
    return event.get("when") != "before" and step == kept and kept != run.last_step


def _choose(
    recorded: Sequence[Mapping[str, Any]], *, best: Best | None, run: RunFiles
) -> list[Mapping[str, Any]]:
    """Choose the evaluations before and after training, and two in between, including the best."""
    before = [event for event in recorded if event.get("when") == "before"][-1:]
    after = [event for event in recorded if event.get("when") == "after"][-1:]
    during = [event for event in recorded if event.get("when") not in ("before", "after")]
    if len(during) > MAX_DURING:
        third = len(during) / 3
        kept = (
            [during[int(third)], during[int(2 * third)]] if after else [during[len(during) // 2], during[-1]]
        )
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
    if _is_result(event, run):
        return f"{title} ({'best, ' * is_best}the result)"
    kept = run.summary.get("result_step")
    if when == "after" and kept not in (None, run.last_step):
        title = "after (the last step, not the result)"
    return f"{title} (best)" if is_best else title


def _row(key: Key, tables: Sequence[Mapping[Key, Mapping[str, Any]]], compares: Sequence[bool]) -> SampleRow:
    samples = [table.get(key) for table in tables]
    reference = next((str(each["reference"]) for each in samples if each and each.get("reference")), "")
    answers = []
    for sample, compared in zip(samples, compares, strict=True):
        if sample is None:
            answers.append(Answer(text=None))
            continue
        text = str(sample.get("answer", ""))
        mark = ("match" if text == reference else "no match") if compared and reference else ""
        frames = [_cut(printable(str(frame))) for frame in listed(sample.get("frames"))[:MAX_FRAMES]]
        score = number(sample.get("score"))
        reward = f"reward {show_number(score).text}" if score is not None else ""
        answers.append(Answer(text=_cut(text), mark=mark, frames=frames, score=reward))
    shown = next((listed(each.get("pictures")) for each in samples if each and each.get("pictures")), [])
    pictures = [one for one in shown[:MAX_PICTURES] if isinstance(one, str) and _PICTURE.fullmatch(one)]
    return SampleRow(
        prompt=_cut(key[0]),
        reference=_cut(reference),
        answers=compare_answers(answers),
        pictures=pictures,
    )


def compare_answers(answers: Sequence[Answer]) -> list[Answer]:
    """Mark the words of each answer that the previous answer lacks; in the first answer, words that the next answer lacks."""
    found = []
    for place, answer in enumerate(answers):
        others = answers[:place][::-1] if place else answers[1:]
        other = next((each for each in others if each.text is not None), None)
        if not answer.text:
            found.append(answer)
        elif other is None:
            found.append(replace(answer, pieces=[Piece(answer.text, False)], is_same=False))
        else:
            pieces = changed_pieces(answer.text, other.text or "")
            same = place > 0 and other.text == answer.text
            found.append(replace(answer, pieces=pieces, is_same=same))
    return found


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}… [{len(text) - MAX_CHARACTERS:,} more characters]"


def changed_pieces(text: str, other: str) -> list[Piece]:
    """Split a text into pieces and mark the words that the other text lacks. A long text stays one piece."""
    words, others = _WORDS.findall(text), _WORDS.findall(other)
    if not text:
        return []
    if max(len(words), len(others)) > MAX_WORDS:
        return [Piece(text, False)]
    matches = SequenceMatcher(a=others, b=words, autojunk=False).get_opcodes()
    pieces = [
        Piece("".join(words[start:stop]), kind != "equal")
        for kind, _, _, start, stop in matches
        if stop > start
    ]
    return _joined(pieces)


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Join changed pieces separated only by space or punctuation: scattered highlights are hard to read."""
    found = list[Piece]()
    for place, piece in enumerate(pieces):
        between = 0 < place < len(pieces) - 1 and not piece.changed and not re.search(r"\w", piece.text)
        changed = piece.changed or (between and pieces[place - 1].changed and pieces[place + 1].changed)
        if found and found[-1].changed == changed:
            found[-1] = Piece(found[-1].text + piece.text, changed)
        else:
            found.append(Piece(piece.text, changed))
    return found


def lead_sample(samples: Samples) -> SampleRow | None:
    """Return the row that best shows the effect of training, with the first answer and the result's."""
    pairs = [
        replace(row, answers=[row.answers[0], row.answers[samples.result]])
        for row in samples.rows
        if row.answers[0].text is not None and row.answers[samples.result].text
    ]
    if not pairs or len(samples.columns) < 2:
        return None
    row = max(pairs, key=_interest)
    return replace(row, answers=compare_answers(row.answers))


def _interest(row: SampleRow) -> tuple[bool, bool, int]:
    """Sort key: newly correct answers first, then changed answers, then shorter answers."""
    first, last = row.answers[0], row.answers[-1]
    became_correct = last.mark == "match" and first.mark != "match"
    return became_correct, first.text != last.text, -len(row.prompt) - len(last.text or "")
