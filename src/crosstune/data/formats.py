"""Rows of any known shape to conversations; the shape is recognised by its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from crosstune.core.errors import UserError
from crosstune.data.chat import as_messages

Row = Mapping[str, Any]

# Format -> the columns that tell it.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}


def recognise(rows: Sequence[Row], *, asked: str, source: str) -> str:
    """The format of a data set; every row must have its columns."""
    first = rows[0]
    if asked == "auto":
        found = [name for name, columns in COLUMNS.items() if all(column in first for column in columns)]
        if not found:
            raise UserError(
                f"The columns of {source} are not known: {', '.join(first) or 'none'}.",
                do=f"rename them to one of: {_known_columns()}",
            )
        asked = found[0]
    for number, row in enumerate(rows, start=1):
        missing = [column for column in COLUMNS[asked] if column not in row]
        if missing:
            raise UserError(
                f"Row {number} of {source} has no column {' or '.join(missing)}.",
                why=f"rows of the format {asked} need {', '.join(COLUMNS[asked])}; it has {', '.join(row) or 'none'}.",
            )
    return asked


def _known_columns() -> str:
    return "; ".join(f"{' + '.join(columns)} ({name})" for name, columns in COLUMNS.items())


def to_conversation(row: Row, form: str) -> list[dict[str, str]] | str:
    """Messages, or a plain text for the format that has no turns."""
    if form == "messages":
        return as_messages(row["messages"])
    if form == "sharegpt":
        return as_messages([_sharegpt_message(item) for item in row["conversations"]])
    if form == "alpaca":
        parts = [_text(row, "instruction"), _text(row, "input") if row.get("input") else ""]
        return _one_turn("\n\n".join(part for part in parts if part), _text(row, "output"))
    if form == "prompt_completion":
        return _one_turn(_text(row, "prompt"), _text(row, "completion"))
    return _text(row, "text")


def _one_turn(prompt: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _sharegpt_message(item: Any) -> dict[str, Any]:
    if not isinstance(item, dict) or "from" not in item or "value" not in item:
        raise UserError("Every turn of a conversation needs `from` and `value`.")
    role = _SHAREGPT_ROLES.get(str(item["from"]))
    if role is None:
        raise UserError(
            f"Unknown speaker '{item['from']}'.", do=f"the speakers that exist: {', '.join(_SHAREGPT_ROLES)}"
        )
    return {"role": role, "content": item["value"]}


def _text(row: Row, column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise UserError(f"The column {column} must hold text.", why=f"found {type(value).__name__}.")
    return value
