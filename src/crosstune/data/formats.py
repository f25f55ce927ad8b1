"""Rows of any known shape to conversations; the shape is recognised by its columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from crosstune.core.errors import UserError

Row = Mapping[str, Any]
Conversation = list[dict[str, str]] | str

# Format -> the columns that tell it, the first that fits is taken.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "question_answer": ("question", "answer"),
    "text": ("text",),
}
# Read only when asked for: the columns are those of another format.
HIDDEN_COLUMNS: Mapping[str, tuple[str, ...]] = {"guanaco": ("text",)}
ROLES = ("system", "developer", "user", "assistant", "tool")

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"} | {role: role for role in ROLES}
_IMAGE_COLUMNS = ("image", "images", "pixel_values", "video", "audio")
_GUANACO_TURNS = {"### Human:": "user", "### Assistant:": "assistant"}


def recognise(first: Row, *, asked: str, source: str) -> str:
    """The format of a data set, by the columns of its first row."""
    images = [name for name in _IMAGE_COLUMNS if first.get(name) is not None]
    if images:
        raise UserError(
            f"{source} has columns that are not text: {', '.join(images)}.",
            why="this kind of training reads text alone.",
            do="use a data set of text, or take these columns out",
        )
    if asked != "auto":
        return asked
    found = _fitting(first)
    if not found:
        raise UserError(
            f"The columns of {source} are not known: {', '.join(map(str, first)) or 'none'}.",
            do=f"rename them to one of: {_known_columns()}",
        )
    return found[0]


def to_conversation(row: Row, form: str) -> Conversation:
    """Messages, or a plain text for the format that has no turns. An answer that is missing is an empty one."""
    _check_columns(row, form)
    if form == "messages":
        return as_messages(row["messages"])
    if form == "sharegpt":
        turns = _parsed(row["conversations"])
        if not isinstance(turns, list):
            raise UserError("A conversation must be a list of turns.", why=f"found {_short(turns)}")
        return as_messages([_sharegpt_message(item) for item in turns])
    if form == "alpaca":
        parts = [_text(row, "instruction"), _text(row, "input") if row.get("input") else ""]
        return _one_turn("\n\n".join(part for part in parts if part), _answer(row, "output"))
    if form == "prompt_completion":
        return _one_turn(_text(row, "prompt"), _answer(row, "completion"))
    if form == "question_answer":
        parts = [_text(row, "context") if row.get("context") else "", _text(row, "question")]
        return _one_turn("\n\n".join(part for part in parts if part), _answer(row, "answer"))
    if form == "guanaco":
        return as_messages(_guanaco_turns(_text(row, "text")))
    return _answer(row, "text")


def has_empty_answer(conversation: Conversation) -> bool:
    """Whether there is nothing to learn from some answer, or from the whole text."""
    if isinstance(conversation, str):
        return not conversation.strip()
    return any(turn["role"] == "assistant" and not turn["content"].strip() for turn in conversation)


def as_messages(value: Any) -> list[dict[str, str]]:
    """A conversation as {role, content} messages in a sensible order; anything else is a UserError."""
    value = _parsed(value)
    if not isinstance(value, list) or not value:
        raise UserError("A conversation must be a list of messages that is not empty.")
    messages = [_message(item) for item in value]
    _check_order([message["role"] for message in messages])
    return messages


def _message(item: Any) -> dict[str, str]:
    if not isinstance(item, Mapping) or "role" not in item or "content" not in item:
        raise UserError("Every message needs a role and a content.", why=f"found {_short(item)}")
    role = str(item["role"])
    if role not in ROLES:
        raise UserError(f"Unknown role '{role}'.", do=f"the roles that exist: {', '.join(ROLES)}")
    content = item["content"]
    if content is None and role == "assistant":
        content = ""
    if isinstance(content, list):
        content = "".join(_text_part(part) for part in content)
    if not isinstance(content, str):
        raise UserError("The content of a message must be text.", why=f"found {_short(content)}")
    return {"role": role, "content": content}


def _text_part(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else None
    what = f"a part of type {kind}" if kind else _short(part)
    raise UserError("The content of a message must be text.", why=f"found {what}")


def _check_order(roles: list[str]) -> None:
    for place, role in enumerate(roles):
        if role in ("system", "developer") and place > 0:
            raise UserError(
                f"The roles are out of order: {role} is turn {place + 1}.",
                why="instructions of the system come first.",
            )
        if role == "assistant" and "user" not in roles[:place]:
            raise UserError(
                f"The roles are out of order: the assistant answers in turn {place + 1} before anyone has asked.",
                do="begin the conversation with a user turn",
            )


def _check_columns(row: Row, form: str) -> None:
    needed = {**COLUMNS, **HIDDEN_COLUMNS}[form]
    missing = [column for column in needed if column not in row]
    if not missing:
        return
    others = [name for name in _fitting(row) if name != form]
    mixed = f" This row looks like {others[0]}: formats cannot be mixed in one data set." if others else ""
    raise UserError(
        f"It has no column {' or '.join(missing)}.",
        why=f"rows of the format {form} need {', '.join(needed)}; it has {', '.join(map(str, row)) or 'none'}.{mixed}",
    )


def _fitting(row: Row) -> list[str]:
    return [name for name, columns in COLUMNS.items() if all(column in row for column in columns)]


def _known_columns() -> str:
    return "; ".join(f"{' + '.join(columns)} ({name})" for name, columns in COLUMNS.items())


def _one_turn(prompt: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _sharegpt_message(item: Any) -> dict[str, Any]:
    if not isinstance(item, Mapping) or "from" not in item or "value" not in item:
        raise UserError("Every turn of a conversation needs `from` and `value`.")
    role = _SHAREGPT_ROLES.get(str(item["from"]))
    if role is None:
        raise UserError(
            f"Unknown speaker '{item['from']}'.", do=f"the speakers that exist: {', '.join(_SHAREGPT_ROLES)}"
        )
    return {"role": role, "content": item["value"]}


def _guanaco_turns(text: str) -> list[dict[str, str]]:
    """`### Human: ...### Assistant: ...` as turns."""
    turns: list[dict[str, str]] = []
    for piece in text.split("###")[1:]:
        mark = next((mark for mark in _GUANACO_TURNS if ("###" + piece).startswith(mark)), None)
        if mark is not None:
            content = piece[len(mark) - len("###") :].strip()
            turns.append({"role": _GUANACO_TURNS[mark], "content": content})
        elif turns:  # a heading inside a turn
            turns[-1]["content"] += "\n###" + piece.rstrip()
    return turns


def _parsed(value: Any) -> Any:
    """CSV has no lists, so a conversation may come as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError as error:
            raise UserError("A conversation written as text must be JSON.", why=str(error)) from error
    return value


def _text(row: Row, column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise UserError(f"The column {column} must hold text.", why=f"found {type(value).__name__}.")
    return value


def _answer(row: Row, column: str) -> str:
    return "" if row[column] is None else _text(row, column)


def _short(value: Any) -> str:
    words = json.dumps(value, ensure_ascii=False, default=str)
    return words if len(words) <= 80 else words[:77] + "..."
