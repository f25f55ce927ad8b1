"""Read items from rows: conversations with a verdict, scored answers, pairs of answers, chosen and rejected answers."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from crosstune.core.errors import UserError, shown
from crosstune.data.read.columns import Columns, check_columns
from crosstune.data.read.files import Row
from crosstune.data.read.formats import check_media, turns_text
from crosstune.data.read.sources import Source, row_error, skipped_row
from crosstune.recipes.judge.items import WINNERS, Item, Scale, read_scale, swapped
from crosstune.recipes.judge.verdicts import parse_text_verdict
from crosstune.recipes.preference.read_pairs import ALIASES as PREFERENCE_ALIASES
from crosstune.recipes.preference.read_pairs import Preference, read_answer, read_preferences

# Column -> other names, tried in this order if the row has no column of the first name.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "task": ("source", "original", "instruction", "prompt", "question"),
    "answer": ("translation", "response", "output", "completion"),
    "answer_a": ("response1", "answer1", "response_a"),
    "answer_b": ("response2", "answer2", "response_b"),
    "score": ("mean", "rating", "label"),
    "score_scale": (),
    "winner": ("preference",),
    "reference": ("reference_answer",),
    "critique": ("feedback", "explanation"),
    "issues": (),
    "rubric": ("criteria",),
    "input": ("context",),
    "id": ("idx", "index"),
    "group": (),
    "messages": (),
    "chosen": (),
    "rejected": (),
    "margin": (),
}
_KNOWN = frozenset(ALIASES).union(*ALIASES.values())
TARGETS = tuple(ALIASES)
"""The columns that --columns may map to."""
_WINNER_NAMES = {
    "a": "A", "1": "A", "answer_a": "A", "response1": "A", "first": "A", "b": "B", "2": "B", "answer_b": "B",
    "response2": "B", "second": "B", "tie": "tie", "0": "tie", "c": "tie", "draw": "tie", "equal": "tie", "none": "tie",
}  # fmt: skip
_SHAPES = (
    "a row has `messages` that end with the verdict; or task, answer and score; or task, answer_a, answer_b and winner; or "
    "prompt, chosen and rejected; "
    "--columns maps other names, as in --columns original=task,mean=score"
)


@dataclass(frozen=True, kw_only=True)
class ItemReader:
    """Turn rows into items."""

    scale: Scale
    """The scale of rows without a column score_scale."""
    scale_asked: bool = False
    """True if the user set the scale: a row with a different scale is an error."""
    columns: Columns = field(default_factory=dict)
    group_by: str | None = None
    """The column that groups rows; None: the column `group`, or the task."""
    references: str = "auto"
    labeled: bool = True
    """True if every row must have a score or a winner."""
    rewards: bool = False
    """True for a reward model: a conversation ends with the answer, not with a verdict."""
    skipped: list[str] | None = None
    """Collects the rows that cannot be read, as lines of skipped_rows.jsonl; None: the first one is an error."""

    def read(self, source: Source) -> list[Item]:
        """Return the items of a source."""
        check_columns([source], self.columns)
        items: list[Item] = []
        skips = self.skipped is not None
        for part, found, _ in replace(source, columns=tuple(self.columns.items()), skips_bad=skips).rows():
            try:
                if found.error is not None:
                    raise found.error
                items.append(self._item(found.row, number=len(items)))
            except UserError as error:
                if self.skipped is None:
                    raise row_error(error, part, found.number) from error
                self.skipped.append(skipped_row(error, part, found.number))
        if not items and self.skipped:
            first = json.loads(self.skipped[0])["reason"]
            raise UserError(f"No row of {source.name} can be read.", why=f"the first: {first}", do=_SHAPES)
        if not items:
            raise UserError(f"The dataset {source.name} is empty.", do="add at least one row")
        self.check_together(items, source.name)
        return items

    def check_together(self, items: Sequence[Item], source: str) -> None:
        """Raise if the rows mix scores and pairs, or only some have a reference."""
        pairs = sum(item.is_pair for item in items)
        if 0 < pairs < len(items):
            raise UserError(
                f"{source} mixes {len(items) - pairs} scored answers with {pairs} pairs of answers.",
                do="put them into two datasets",
            )
        without = sum(not item.reference for item in items)
        if self.references == "auto" and 0 < without < len(items):
            raise UserError(
                f"{without} of {len(items)} rows of {source} have no reference.",
                why="with a reference for only some of the answers, a judge learns two tasks at once.",
                do="add the references, or pass --references optional or --references ignore",
            )

    def _item(self, row: Row, *, number: int) -> Item:
        check_media(row)
        fields = _named_fields(row)
        group = self._group(row, fields)
        shared: dict[str, Any] = {
            "id": _text(fields.get("id")) or str(number),
            "extra": {name: value for name, value in row.items() if name not in fields["used"]},
        }
        if _has_preference(row):
            prompt = {"prompt": row["task"]} if row.get("task") is not None else {}
            [pair] = read_preferences({**row, **prompt}, paired=True)
            return _from_preference(pair, group=group, shared=shared | {"margin": _margin(fields)})
        one = read_answer(row) if self.rewards and "answer_a" not in fields else None
        if one is not None:
            return _from_preference(one, group=group, shared=shared)
        if "messages" in fields and "score" not in fields and "winner" not in fields:
            return self._from_messages(fields, group=group, shared=shared)
        scale, task, more = self._own_scale(fields), _required(fields, "task"), _text(fields.get("input"))
        shared |= {
            "task": f"{task}\n\n{more}" if more.strip() else task,
            "reference": "" if self.references == "ignore" else _text(fields.get("reference")),
            "rubric": _text(fields.get("rubric")),
            "critique": _text(fields.get("critique")),
            "issues": _issues(fields.get("issues")),
        }
        shared["group"] = group or shared["task"]
        if "answer_a" in fields or "answer_b" in fields:
            answers = (_required(fields, "answer_a"), _required(fields, "answer_b"))
            return Item(**shared, answers=answers, winner=self._winner(fields), margin=_margin(fields))
        score = self._score(fields, scale or self.scale)
        return Item(**shared, answers=(_required(fields, "answer"),), score=score, scale=scale)

    def _from_messages(self, fields: Mapping[str, Any], *, group: str, shared: dict[str, Any]) -> Item:
        """Read a conversation that ends with the verdict."""
        messages = fields["messages"]
        is_list = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
        if not is_list or len(messages) < 2 or messages[-1].get("role") != "assistant":
            raise UserError("`messages` does not end with the assistant's verdict.", do=_SHAPES)
        verdict = str(messages[-1].get("content", ""))
        found = parse_text_verdict(verdict)
        if found.score is None:
            raise UserError(
                f"The verdict has no score: {shown(verdict)}.",
                do="write it as `Score: N/10`, or `[RESULT] N`",
            )
        scale = self._own_scale(fields)
        _check_scale(found.score, scale or self.scale, out_of=found.out_of)
        asked = str(messages[-2].get("content", ""))
        task = _text(fields.get("task")) or asked
        return Item(
            **shared,
            group=group or task,
            task=task,
            answers=(_text(fields.get("answer")) or asked,),
            score=found.score,
            scale=scale,
            critique=found.feedback,
            issues=found.issues,
            messages=[dict(message) for message in messages[:-1]],
            verdict=verdict,
        )

    def _group(self, row: Row, fields: Mapping[str, Any]) -> str:
        if self.group_by is None:
            return _text(fields.get("group"))
        if self.group_by not in row:
            raise UserError(
                f"The column '{self.group_by}' of --group_by is missing.",
                do=f"its columns are: {', '.join(map(str, row))}",
            )
        return _text(row[self.group_by])

    def _own_scale(self, fields: Mapping[str, Any]) -> Scale | None:
        """Return the scale in the row, or None."""
        text = _text(fields.get("score_scale")).strip()
        if not text:
            return None
        scale = read_scale(text)
        if self.scale_asked and scale != self.scale:
            raise UserError(
                f"score_scale is {scale}, but --score_scale is {self.scale}.",
                do="remove --score_scale, or correct the data",
            )
        return scale

    def _label(self, fields: Mapping[str, Any], name: str) -> Any:
        value = fields.get(name)
        if value is not None and str(value).strip():
            return value
        if self.labeled:
            raise UserError(f"The {name} is missing.", do=_SHAPES)
        return None

    def _score(self, fields: Mapping[str, Any], scale: Scale) -> float | None:
        if (value := self._label(fields, "score")) is None:
            return None
        score = _number(value)
        if not math.isfinite(score):
            raise UserError(f"The score is not a number: {shown(value)}.")
        _check_scale(score, scale)
        return score

    def _winner(self, fields: Mapping[str, Any]) -> str | None:
        if (value := self._label(fields, "winner")) is None:
            return None
        name = _WINNER_NAMES.get(_text(value).strip().lower())
        if name is None:
            raise UserError(f"Invalid winner: {shown(value)}.", do=f"use one of {', '.join(WINNERS)}")
        return name


def split_row(item: Item, name: str, *, scale: Scale) -> dict[str, Any]:
    """Return an item as a row that reads back as the same item, with a different id."""
    row: dict[str, Any] = {column: value for column, value in item.extra.items() if column not in _KNOWN}
    row |= {"id": name, "group": item.group}
    if not item.is_pair:
        row["score_scale"] = str(scale)
    if item.messages:
        said = [*map(dict, item.messages), {"role": "assistant", "content": item.verdict}]
        return row | {"messages": said, "source": item.task, "translation": item.answers[0]}
    if item.replies:
        better = item if item.winner != "B" else swapped(item)
        sides = dict(zip(("chosen", "rejected"), map(list, better.replies), strict=True))
        return row | {"prompt": list(item.prompt), **sides, "tools": item.tools, "margin": item.margin}
    row |= {"task": item.task, "reference": item.reference, "rubric": item.rubric}
    row |= {"critique": item.critique, "issues": list(item.issues)}
    if item.is_pair:
        pair = {"answer_a": item.answers[0], "answer_b": item.answers[1], "winner": item.winner}
        return row | pair | ({"margin": item.margin} if item.margin else {})
    return row | {"answer": item.answers[0], "score": item.score}


def _from_preference(one: Preference, *, group: str, shared: dict[str, Any]) -> Item:
    """Return the item of a chosen and a rejected answer, or of a single answer.

    A hash of the texts decides which answer is A, so that the order tells a judge nothing.
    """
    task, *answers = (turns_text(turns) for turns in (one.prompt, *one.answers))
    item = Item(
        **shared,
        group=group or task,
        task=task,
        answers=tuple(answers),
        prompt=one.prompt,
        replies=one.answers,
        tools=one.tools,
    )
    if not item.is_pair:
        return item
    item = replace(item, winner="A" if one.answers[0] != one.answers[1] else "tie")
    digest = hashlib.sha256(repr([task, *answers]).encode(errors="surrogatepass")).digest()
    return swapped(item) if digest[0] % 2 else item


def _has_preference(row: Row) -> bool:
    sides = ("chosen", "rejected")
    named = [any(row.get(each) is not None for each in (side, *PREFERENCE_ALIASES[side])) for side in sides]
    return all(named) or any(side in row for side in sides)


def _margin(fields: Mapping[str, Any]) -> float:
    value = fields.get("margin", 0.0)
    margin = _number(value)
    if not math.isfinite(margin):
        raise UserError(f"The margin is not a number: {shown(value)}.", do="correct it, or rename the column")
    return margin


def _number(value: Any) -> float:
    """Return a value as a number; NaN if it is not one."""
    try:
        return math.nan if isinstance(value, bool) or "_" in str(value) else float(value)
    except (TypeError, ValueError):
        return math.nan


def _check_scale(score: float, scale: Scale, *, out_of: float | None = None) -> None:
    """Raise for a score outside the scale, or if its highest score differs from the scale's."""
    do = "set the scale of the data with --score_scale LOW-HIGH, or correct the row"
    if not scale.holds(score):
        raise UserError(f"The score {score:g} is outside the scale {scale}.", do=do)
    if out_of is not None and out_of != scale.high:
        raise UserError(f"The verdict is {score:g} of {out_of:g}, but the scale is {scale}.", do=do)


def _named_fields(row: Row) -> dict[str, Any]:
    """Return the values of a row by our column names, and under `used` their columns."""
    found: dict[str, Any] = {}
    used: set[str] = set()
    for name, aliases in ALIASES.items():
        column = next((each for each in (name, *aliases) if row.get(each) is not None), None)
        if column is not None and column not in used:
            found[name] = row[column]
            used.add(column)
    return found | {"used": used}


def _required(fields: Mapping[str, Any], name: str) -> str:
    text = _text(fields.get(name))
    if not text.strip():
        raise UserError(f"The column {name} is missing.", do=_SHAPES)
    return text


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _issues(value: Any) -> tuple[str, ...]:
    parts = map(str, value) if isinstance(value, (list, tuple)) else map(str.strip, _text(value).split(";"))
    return tuple(part for part in parts if part)
