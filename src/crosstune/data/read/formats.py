"""Detect the format of rows by their columns, and convert rows to conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from crosstune.core.errors import UserError
from crosstune.data.read.pictures import COLUMNS as PICTURE_COLUMNS
from crosstune.data.read.pictures import IN_TEXT, PICTURE_TYPES, PICTURES, picture_parts, place_pictures
from crosstune.data.render.types import EXCLUDED, NO_LOSS, REASONING_KEYS
from crosstune.files.json_files import parse_json

Row = Mapping[str, Any]
Turn = dict[str, Any]
Conversation = list[Turn] | str

# Format -> the columns that identify it; the first match wins.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "question_answer": ("question", "answer"),
    "text": ("text",),
}
# Used only on request: a different format has the same columns.
HIDDEN_COLUMNS: Mapping[str, tuple[str, ...]] = {"guanaco": ("text",)}
# Optional columns of every format.
SYSTEM_COLUMNS = ("system", "system_prompt")
TOOLS_COLUMN = "tools"
_MORE_COLUMNS: Mapping[str, tuple[str, ...]] = {"alpaca": ("input",), "question_answer": ("context",)}
OPTIONAL_COLUMNS = ("input", "context", *SYSTEM_COLUMNS, TOOLS_COLUMN)
WITHOUT_TURNS = ("text",)
ROLES = ("system", "developer", "user", "assistant", "tool")
TURN_KEYS = (
    "tool_calls", "tool_call_id", "tool_plan", "name", "reasoning_content", "reasoning", "thinking"
)  # fmt: skip
"""Extra keys of a message; the chat template determines how they are rendered."""
LOSS_KEYS: Mapping[str, bool] = {
    "weight": True, "train": True, "training": True, "mask": False, "masked": False
}  # fmt: skip
"""Keys of other tools that include a turn in the loss or exclude it -> the value that includes it."""
_FLAGS = {
    "0": False, "0.0": False, "false": False, "no": False, "1": True, "1.0": True, "true": True, "yes": True
}  # fmt: skip
_MESSAGE_KEYS = {"role", "from", "content", "value", *TURN_KEYS}

# Role names of other tools, in any case -> ours.
ROLE_ALIASES: Mapping[str, str] = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "function": "tool",
    "observation": "tool",
}
_EMPTY: tuple[Any, ...] = (None, "", [])
_MEDIA_COLUMNS = ("pixel_values", "video", "audio")
TEXT_ONLY = "this recipe reads text only"
_REMOVE = "train on pictures with --recipe sft and a vision-language model, or remove"
_NAME_COLUMNS = "specify the columns to read with --columns, as in --columns query=prompt,reply=completion"
_GUANACO_TURNS = {"### Human:": "user", "### Assistant:": "assistant"}


def detect_format(first: Row, *, asked: str, source: str) -> str:
    """Return the requested format, or detect it from the columns of the first row."""
    check_media(first, what=source, no_pictures="")
    if asked != "auto":
        return asked
    found = fitting_formats(first)
    if not found:
        raise UserError(
            f"The columns of {source} match no known format: {', '.join(map(str, first)) or 'none'}.",
            **_how_to_read(first),
        )
    return found[0]


def to_conversation(row: Row, form: str, *, no_pictures: str = TEXT_ONLY) -> Conversation:
    """Return the messages of a row, or its text for the format without turns. A missing answer becomes an empty answer.

    `no_pictures` says why pictures cannot be read; if it is empty, messages have the references of their pictures."""
    check_media(row, no_pictures=no_pictures)
    _check_columns(row, form)
    if form in WITHOUT_TURNS:
        check_media(row, no_pictures="pictures belong to a message, and this format has none")
        return _answer(row, "text")
    turns = _turns(row, form, no_pictures)
    if not no_pictures:
        turns = place_pictures(turns, row)
    column = _system_column(row)
    if column is not None and turns[0]["role"] not in ("system", "developer"):
        turns = [{"role": "system", "content": _text(row, column)}, *turns]
    return turns


def tools_of(row: Row) -> list[Any] | None:
    """Return the tools that the model may call in this conversation, in the form that chat templates expect."""
    tools = row.get(TOOLS_COLUMN)
    return parsed_list(tools, f"The {TOOLS_COLUMN} column") if tools else None


def unused_columns(row: Row, form: str) -> set[str]:
    """Return the non-empty columns that are not read, and such keys of messages as `messages.key`."""
    used = {*_needed(form), *_MORE_COLUMNS.get(form, ())}
    if form not in WITHOUT_TURNS:
        used |= {TOOLS_COLUMN, *PICTURE_COLUMNS} | (
            {column} if (column := _system_column(row)) is not None else set()
        )
    unused = {str(name) for name, value in row.items() if name not in used and value not in _EMPTY}
    lists = [] if form in WITHOUT_TURNS else [(name, _listed(row[name])) for name in _needed(form)]
    return unused | {
        f"{name}.{key}"
        for name, items in lists
        if isinstance(items, list)
        for item in items
        for key, value in item.items()
        if key not in _MESSAGE_KEYS
        and value not in _EMPTY
        and not (key in LOSS_KEYS and _flag(value) is not None)
    }


def turn_keys(conversation: Conversation) -> set[str]:
    """Return the extra keys of the messages."""
    return {key for turn in conversation for key in turn if isinstance(turn, dict) and key in TURN_KEYS}


def _turns(row: Row, form: str, no_pictures: str) -> list[Turn]:
    if form in ("messages", "sharegpt"):
        return as_messages(row[_needed(form)[0]], no_pictures=no_pictures)
    if form == "prompt_completion":
        return _prompt_and_completion(row, no_pictures)
    if form in ("alpaca", "question_answer"):
        names = ("instruction", "input") if form == "alpaca" else ("context", "question")
        parts = [_text(row, name) for name in names if name in _needed(form) or row.get(name)]
        return _one_turn("\n\n".join(filter(None, parts)), _answer(row, _needed(form)[1]))
    assert form == "guanaco", form
    return as_messages(_guanaco_turns(_text(row, "text")))


def has_empty_answer(
    conversation: Conversation, *, shows_reasoning: Callable[[int], bool] = lambda _: True, rules: int = 3
) -> bool:
    """Return True if the whole text is empty, or an answer to learn: it has neither text nor tool calls, nor reasoning that
    the template shows in this turn. Before version 3 of the `rules`, reasoning did not count, and all answers had to have text."""
    if isinstance(conversation, str):
        return not conversation.strip()
    for place, turn in enumerate(conversation):
        if turn["role"] != "assistant" or turn["content"].strip() or turn.get("tool_calls"):
            continue
        is_reasoning = any(key in turn for key in REASONING_KEYS)
        if rules < 3 or not (NO_LOSS in turn or (is_reasoning and shows_reasoning(place))):
            return True
    return False


def as_messages(value: Any, *, no_pictures: str = TEXT_ONLY) -> list[Turn]:
    """Return a conversation as messages with role, content and `TURN_KEYS`; raise a UserError when it is not valid."""
    messages = [_message(item, no_pictures) for item in parsed_list(value, "A conversation")]
    if not messages:
        raise UserError("A conversation must contain messages.")
    _check_order([message["role"] for message in messages])
    return messages


def _message(item: Any, no_pictures: str) -> Turn:
    """Return a message. The role may be under `from`, and the content under `value`, as in ShareGPT."""
    if isinstance(item, Mapping):
        item = dict(item)
        for key, other in (("role", "from"), ("content", "value")):
            if item.get(key) is None and item.get(other) is not None:  # Parquet fills missing keys with None
                item[key] = item[other]
    if (
        not isinstance(item, Mapping)
        or "role" not in item
        or not ("content" in item or item.get("tool_calls"))
    ):
        raise UserError(
            "Every message needs role and content, or from and value.", why=f"found {_short(item)}"
        )
    role = ROLE_ALIASES.get(str(item["role"]).lower(), str(item["role"]).lower())
    if role not in ROLES:
        known = ", ".join((*ROLES, *ROLE_ALIASES))
        raise UserError(f"Unknown role '{item['role']}'.", do=f"the roles are: {known}")
    content: Any = item.get("content")
    if content is None and role == "assistant":
        content = ""
    pictures: list[Any] = []
    if isinstance(content, list):
        if no_pictures:
            content = "".join(_text_part(part, no_pictures) for part in content)
        else:
            content, pictures = picture_parts(content)
    if not isinstance(content, str) or content.count(IN_TEXT) != len(pictures):
        raise UserError("The content of a message must be text.", why=f"found {_short(content)}")
    more: dict[str, Any] = {PICTURES: pictures} if pictures else {}
    more |= {key: item[key] for key in TURN_KEYS if item.get(key) not in _EMPTY}
    if "tool_calls" in more:
        more["tool_calls"] = parsed_list(more["tool_calls"], "tool_calls")
    if role == "assistant" and not _carries_loss(item):
        more[NO_LOSS] = EXCLUDED
    return {"role": role, "content": content, **more}


def _carries_loss(item: Mapping[str, Any]) -> bool:
    """Return False if a key such as `weight: 0` excludes a turn from the loss."""
    weight = item.get("weight")
    if isinstance(weight, (int, float, str)) and weight != "" and _flag(weight) is None:
        raise UserError(
            f"A message has the weight {_short(weight)}.",
            why="a turn either carries loss or does not.",
            do="set its weight to 0 or 1",
        )
    return all(_flag(item.get(key)) in (None, includes) for key, includes in LOSS_KEYS.items())


def _flag(value: Any) -> bool | None:
    """Return a switch as True or False, even one written as text, as in CSV; None for any other value."""
    if isinstance(value, str):
        return _FLAGS.get(value.strip().lower())
    return bool(value) if isinstance(value, (bool, int, float)) and value in (0, 1) else None


def _text_part(part: Any, no_pictures: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    do = f"{_REMOVE} this part" if isinstance(part, Mapping) and part.get("type") in PICTURE_TYPES else ""
    raise UserError(
        "The content of a message must be text.", why=f"found {_short(part)}; {no_pictures}.", do=do
    )


def _check_order(roles: list[str]) -> None:
    for place, role in enumerate(roles):
        late = role in ("system", "developer") and place > 0
        if late or (role == "assistant" and "user" not in roles[:place]):
            raise UserError(
                f"The roles are out of order: {role} is turn {place + 1}.",
                why="system instructions come first." if late else "it is an answer before any question.",
                do="move its text to the first turn, or make it a user turn"
                if late
                else "start the conversation with a user turn",
            )


def _check_columns(row: Row, form: str) -> None:
    needed = _needed(form)
    missing = [column for column in needed if column not in row]
    if not missing:
        return
    others = [name for name in fitting_formats(row) if name != form]
    mixed = f" This row looks like {others[0]}." if others else ""
    raise UserError(
        f"Missing column {' or '.join(missing)}.",
        why=f"rows of the format {form} need {', '.join(needed)}; it has {', '.join(map(str, row)) or 'none'}.{mixed}",
        do=f"use --dataset_format {others[0]} if all rows look like this one; a file has one format"
        if others
        else _mapping_of(row, needed, missing),
    )


def _mapping_of(row: Row, needed: Sequence[str], missing: Sequence[str]) -> str:
    """Return the advice to map columns to a format; it is exact if there is only one choice."""
    spare = [str(name) for name in row if name not in needed]
    if not spare or len(missing) != 1:
        return _NAME_COLUMNS
    pairs = " or ".join(f"--columns {name}={missing[0]}" for name in spare[:3])
    return f"specify the column to read with {pairs}"


def _needed(form: str) -> tuple[str, ...]:
    return {**COLUMNS, **HIDDEN_COLUMNS}[form]


def _system_column(row: Row) -> str | None:
    return next((name for name in SYSTEM_COLUMNS if row.get(name) not in (None, "")), None)


def check_media(row: Row, *, what: str = "It", no_pictures: str = TEXT_ONLY) -> None:
    """Raise if a row has pictures, video or audio in columns; `no_pictures` is empty if pictures are read."""
    columns = (*PICTURE_COLUMNS, *_MEDIA_COLUMNS) if no_pictures else _MEDIA_COLUMNS
    media = [name for name in columns if row.get(name) not in _EMPTY]
    if media:
        raise UserError(
            f"{what} has columns that are not text: {', '.join(media)}.",
            why=f"{no_pictures or 'video and audio are not read'}.",
            do=f"{_REMOVE} these columns" if no_pictures else "use a text dataset, or remove these columns",
        )


def _how_to_read(row: Row) -> dict[str, str]:
    """Return advice for columns that match no format, and the reason, if known."""
    if {"chosen", "rejected"} <= row.keys():
        return {
            "why": "these are preferences.",
            "do": "train on them with --recipe preference, or on the chosen answers with --columns chosen=completion; "
            "`crosstune judge train --head scalar` trains a reward model",
        }
    known = "; ".join(f"{' + '.join(columns)} ({name})" for name, columns in COLUMNS.items())
    how = f"read its text with --columns {next(iter(row))}=text" if len(row) == 1 else _NAME_COLUMNS
    return {"do": f"{how}; the formats are: {known}"}


def fitting_formats(row: Row) -> list[str]:
    """Return the formats whose columns the row has, preferred first."""
    return [name for name, columns in COLUMNS.items() if all(column in row for column in columns)]


def _one_turn(prompt: str, answer: str) -> list[Turn]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _prompt_and_completion(row: Row, no_pictures: str) -> list[Turn]:
    """Return the turns of a prompt and its completion, each a string or a list of messages. Only the completion carries
    loss, not the answers in the prompt."""
    prompt, completion = _listed(row["prompt"]), _listed(row["completion"])
    if not isinstance(prompt, list) and not isinstance(completion, list):
        return _one_turn(_text(row, "prompt"), _answer(row, "completion"))
    if not isinstance(prompt, list):
        prompt = [{"role": "user", "content": _text(row, "prompt")}]
    if not isinstance(completion, list):
        completion = [{"role": "assistant", "content": _answer(row, "completion")}]
    turns = as_messages([*prompt, *completion], no_pictures=no_pictures)
    if not any(turn["role"] == "assistant" for turn in turns[len(prompt) :]):
        raise UserError("The completion has no assistant message.")
    return [
        {NO_LOSS: True, **turn} if turn["role"] == "assistant" and place < len(prompt) else turn
        for place, turn in enumerate(turns)
    ]


def _listed(value: Any) -> Any:
    """Parse a list of messages given as JSON text; return any other value unchanged."""
    if not (isinstance(value, str) and value.lstrip().startswith("[")):
        return value
    try:
        found = parse_json(value, foreign=True)
    except ValueError:
        return value
    is_messages = isinstance(found, list) and found and all(isinstance(item, dict) for item in found)
    return found if is_messages else value


def _guanaco_turns(text: str) -> list[Turn]:
    """Split `### Human: ...### Assistant: ...` into turns."""
    turns: list[Turn] = []
    for piece in text.split("###")[1:]:
        mark = next((mark for mark in _GUANACO_TURNS if ("###" + piece).startswith(mark)), None)
        if mark is not None:
            content = piece[len(mark) - len("###") :].strip()
            turns.append({"role": _GUANACO_TURNS[mark], "content": content})
        elif turns:  # a heading inside a turn
            turns[-1]["content"] += "\n###" + piece.rstrip()
    if not turns:
        raise UserError(
            f"The text has no turns that start with {' or '.join(_GUANACO_TURNS)}.",
            do="use --dataset_format text for text without turns",
        )
    return turns


def turns_text(turns: Sequence[Mapping[str, Any]], between: str = "\n") -> str:
    """Return the text of a single turn, or each turn after its role."""
    if len(turns) == 1:
        return str(turns[0]["content"])
    return between.join(f"{turn['role']}: {turn['content']}" for turn in turns)


def parsed_list(value: Any, what: str) -> list[Any]:
    """Return a list, parsed if it is JSON text, since CSV does not support lists."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = parse_json(value, foreign=True)
        except ValueError as error:
            raise UserError(f"{what} must contain a list, as JSON in a string.", why=str(error)) from error
    if not isinstance(value, list):
        raise UserError(f"{what} must contain a list.", why=f"found {_short(value)}")
    return value


def _text(row: Row, column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise UserError(f"The {column} column must contain text.", why=f"found {_short(value)}.")
    return value


def _answer(row: Row, column: str) -> str:
    return "" if row[column] is None else _text(row, column)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
