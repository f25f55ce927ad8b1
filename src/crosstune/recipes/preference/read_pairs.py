"""Read preferences from rows: pairs of a chosen and a rejected answer, or single answers with a label."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from crosstune.core.errors import UserError, shown
from crosstune.data.read.files import Row
from crosstune.data.read.formats import (
    ROLE_ALIASES,
    SYSTEM_COLUMNS,
    Turn,
    as_messages,
    check_media,
    parsed_list,
    tools_of,
)
from crosstune.data.render.types import NO_LOSS

# Column -> other names, tried in this order if the row has no column of the first name.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("instruction", "question", "conversations", "messages", "query"),
    "chosen": ("chosen_response", "response_chosen", "accepted", "preferred"),
    "rejected": ("rejected_response", "response_rejected", "dispreferred"),
    "completion": ("response", "output", "answer"),
    "label": ("kto_tag",),
    "input": ("context",),
    "system": SYSTEM_COLUMNS[1:],
    "tools": (),
}
TARGETS = tuple(ALIASES)
"""The columns that --columns may map to."""
_SHAPES = (
    "a row has prompt, chosen and rejected, each text or a list of messages; or for kto prompt, completion and label; "
    "--columns maps other names, as in --columns better=chosen,worse=rejected"
)
_MARK = re.compile(r"(?:^|\n\n)(Human|Assistant):[ \t]?")
"""The turns of a conversation in one text, as in Anthropic's HH data."""
_LABELS = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True, kw_only=True)
class Preference:
    """Answers to a prompt: the chosen and the rejected one, or one answer with a label."""

    prompt: Sequence[Turn]
    answers: tuple[Sequence[Turn], ...]
    is_desirable: bool | None = None
    """None for a pair."""
    tools: Sequence[Any] | None = None
    place: str = field(default="", compare=False)
    """The file and line of the row."""

    def conversations(self) -> list[dict[str, Any]]:
        """Return a row of messages for each answer, in the form of a dataset; answers in the prompt carry no loss."""
        prompt = [_without_loss(turn) if turn["role"] == "assistant" else turn for turn in self.prompt]
        tools = {"tools": self.tools} if self.tools else {}
        answers = ([_without_loss(turn) if NO_LOSS in turn else turn for turn in one] for one in self.answers)
        return [{"messages": [*prompt, *answer], **tools} for answer in answers]


def _without_loss(turn: Turn) -> Turn:
    return {**{key: value for key, value in turn.items() if key != NO_LOSS}, "train": False}


def read_preferences(row: Row, *, paired: bool, place: str = "") -> list[Preference]:
    """Return the preference of a row; for kto, a pair becomes two answers with labels."""
    found = _named(row)
    tools = tools_of(row)
    if "chosen" in found or "rejected" in found:
        for side in ("chosen", "rejected"):
            if found.get(side) in (None, "", [], {}):
                raise UserError(f"The {side} answer is missing.", do=_SHAPES)
        prompt, chosen, rejected = _pair(found, why=_why_no_prompt(row))
        if paired:
            return [Preference(prompt=prompt, answers=(chosen, rejected), tools=tools, place=place)]
        return [
            Preference(prompt=prompt, answers=(answer,), is_desirable=good, tools=tools, place=place)
            for answer, good in ((chosen, True), (rejected, False))
        ]
    if "label" not in found or paired:
        raise UserError(
            "The row is not a pair of answers." if paired else "The row has no label.",
            why=f"its columns are {', '.join(map(str, row)) or 'none'}.",
            do=f"use --preference_loss kto for answers with a label; {_SHAPES}"
            if paired and "label" in found
            else _SHAPES,
        )
    label = _read_label(found["label"])
    prompt, answer = _single(found, why=_why_no_prompt(row))
    return [Preference(prompt=prompt, answers=(answer,), is_desirable=label, tools=tools, place=place)]


def read_answer(row: Row) -> Preference | None:
    """Return the single answer of a row, without a label; None if its columns have other names."""
    found = _named(row)
    if "prompt" not in found or ("completion" not in found and isinstance(found["prompt"], str)):
        return None
    prompt, answer = _single(found, why=_why_no_prompt(row))
    return Preference(prompt=prompt, answers=(answer,), tools=tools_of(row))


def _named(row: Row) -> dict[str, Any]:
    """Return the values of a row by our column names."""
    check_media(row)
    found: dict[str, Any] = {}
    for name, aliases in ALIASES.items():
        column = next((each for each in (name, *aliases) if row.get(each) is not None), None)
        if column is not None:
            found[name] = row[column]
    return found


def _why_no_prompt(row: Row) -> str:
    name = next((each for each in ("prompt", *ALIASES["prompt"]) if each in row), None)
    if name is None:
        return "there is no column prompt"
    return f"its column {name} is {'null' if row[name] is None else 'empty'}"


def _pair(found: Mapping[str, Any], *, why: str) -> tuple[list[Turn], list[Turn], list[Turn]]:
    chosen, rejected = _turns(found["chosen"], "chosen"), _turns(found["rejected"], "rejected")
    prompt = _prompt(found)
    if not prompt:
        same = 0
        while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
            same += 1
        prompt, chosen, rejected = chosen[:same], chosen[same:], rejected[same:]
        if not chosen or not rejected:
            raise UserError("The chosen and the rejected conversation are the same.")
        if not prompt or chosen[0]["role"] != "assistant" or rejected[0]["role"] != "assistant":
            raise UserError(
                "The row has no prompt.",
                why=f"{why}, and the two conversations have no question in common.",
                do=_SHAPES,
            )
    else:
        chosen, rejected = (_after(prompt, answer) for answer in (chosen, rejected))
    for answer in (chosen, rejected):
        _check(prompt, answer)
    return prompt, chosen, rejected


def _single(found: Mapping[str, Any], *, why: str) -> tuple[list[Turn], list[Turn]]:
    prompt = _prompt(found)
    if "completion" in found:
        answer = _after(prompt, _turns(found["completion"], "completion"))
    else:  # a conversation that ends with the answer
        prompt, answer = prompt[:-1], prompt[-1:]
    if not prompt:
        raise UserError("The row has no prompt.", why=f"{why}.", do=_SHAPES)
    _check(prompt, answer)
    return prompt, answer


def _prompt(found: Mapping[str, Any]) -> list[Turn]:
    value = found.get("prompt")
    if value in (None, []) or (isinstance(value, str) and not value.strip()):
        turns: list[Turn] = []
    elif isinstance(value, str) and not value.lstrip().startswith("["):
        more = found.get("input")
        text = f"{value}\n\n{more}" if isinstance(more, str) and more.strip() else value
        turns = _marked_turns(text) or [{"role": "user", "content": text}]
    else:
        turns = as_messages(value)
    system = found.get("system")
    if (
        isinstance(system, str)
        and system.strip()
        and (not turns or turns[0]["role"] not in ("system", "developer"))
    ):
        turns = [{"role": "system", "content": system}, *turns]
    return turns


def _turns(value: Any, column: str) -> list[Turn]:
    """Return the turns of an answer: text, one message, or a list of messages."""
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, str) and not value.lstrip().startswith("[{"):
        return _marked_turns(value) or [{"role": "assistant", "content": value}]
    if not isinstance(value, (str, list)):
        raise UserError(
            f"The {column} answer must be text or a list of messages.",
            why=f"it is {shown(value)}.",
            do=_SHAPES,
        )
    turns = parsed_list(value, "An answer")
    first = turns[0].get("role", turns[0].get("from")) if turns and isinstance(turns[0], Mapping) else None
    if ROLE_ALIASES.get(str(first), first) in ("system", "developer", "user"):
        return as_messages(turns)
    # The order of roles is checked with the prompt.
    return as_messages([{"role": "user", "content": ""}, *turns])[1:]


def _marked_turns(text: str) -> list[Turn]:
    """Return the turns of a text such as "\\n\\nHuman: ...\\n\\nAssistant: ..."; empty if it is not one."""
    marks = list(_MARK.finditer(text))
    if not marks or marks[0].start() or marks[0].group(1) != "Human":
        return []
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    turns = [
        {
            "role": "user" if mark.group(1) == "Human" else "assistant",
            "content": text[mark.end() : end].strip(),
        }
        for mark, end in zip(marks, ends, strict=True)
    ]
    return turns[:-1] if turns[-1] == {"role": "assistant", "content": ""} else turns


def _after(prompt: Sequence[Turn], answer: list[Turn]) -> list[Turn]:
    """Return an answer without a prompt that it repeats."""
    without_system = [turn for turn in prompt if turn["role"] != "system"]
    for start in (list(prompt), without_system):
        if len(answer) > len(start) and answer[: len(start)] == start:
            return answer[len(start) :]
    return answer


def _check(prompt: Sequence[Turn], answer: Sequence[Turn]) -> None:
    as_messages([*prompt, *answer])  # raises for roles that are out of order
    if not any(
        turn["role"] == "assistant" and (turn["content"].strip() or turn.get("tool_calls")) for turn in answer
    ):
        raise UserError("An answer is empty.", do=_SHAPES)


def _read_label(value: Any) -> bool:
    label = value if isinstance(value, bool) else _LABELS.get(str(value).strip().lower())
    if isinstance(value, float) and value in (0.0, 1.0):
        label = bool(value)
    if label is None:
        raise UserError(
            f"The label is {shown(value)}.",
            why="kto learns from answers that are desirable or not.",
            do="write true or false, or 1 or 0",
        )
    return label
