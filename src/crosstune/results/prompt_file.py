"""Read prompts and conversations from files, and write answers and conversations."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.data.read.formats import to_conversation
from crosstune.data.read.pictures import COLUMNS, PICTURE_TYPES
from crosstune.data.render.types import Message
from crosstune.files.json_files import LINE_LIMIT, parse_json, to_json
from crosstune.files.outputs import is_stream, write_output
from crosstune.files.plain_files import UnreadableFile, open_plain, read_plain_text

JSON_LINES = (".jsonl", ".json", ".ndjson")
PROMPTS_LIMIT = 256 << 20
_ROWS = 'write each line as {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A conversation to continue."""

    messages: Sequence[Message]
    text: str | None
    """The prompt if it is a string; None for a conversation."""
    reference: str | None = None
    """The answer in the file, if any."""
    line: int = field(default=1, repr=False, compare=False)
    """The number of its line in the file."""

    def row(self, answer: str) -> dict[str, Any]:
        """Return the row of the output file."""
        asked = {"messages": self.messages} if self.text is None else {"prompt": self.text}
        return {**asked, "answer": answer, **({"reference": self.reference} if self.reference else {})}


def make_prompt(text: str, *, system: str = "") -> Prompt:
    return Prompt(messages=[*_system(system), {"role": "user", "content": text}], text=text)


def read_prompts(path: Path, *, system: str = "", say: Callable[[str], None]) -> list[Prompt]:
    """Read a text file with a prompt per line, or JSON Lines with `messages` or `prompt`. Skip empty lines, and say so."""
    try:
        lines = read_plain_text(path, limit=PROMPTS_LIMIT).removeprefix("\ufeff").split("\n")
    except UnreadableFile as error:
        raise UserError(f"Cannot read the prompts in {path}.", why=error.why, do=error.do) from error
    numbered = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UserError(f"{path} has no prompts.", do="write one prompt per line, or JSON lines")
    if num_empty := len(lines) - (not lines[-1].strip()) - len(numbered):
        say(f"skipped {num_empty:,} empty line{'s' * (num_empty > 1)} of {path}")
    if path.suffix.lower() not in JSON_LINES:
        found = [make_prompt(line, system=system) for _, line in numbered]
    else:
        found = [_read_row(line, place=f"{path}, line {number}", system=system) for number, line in numbered]
    return [replace(prompt, line=number) for prompt, (number, _) in zip(found, numbered, strict=True)]


def _read_row(line: str, *, place: str, system: str) -> Prompt:
    try:
        row = parse_json(line, foreign=True)
    except ValueError as error:
        raise UserError(
            f"{place} is not JSON.",
            why=f"{str(error).rstrip('.')}.",
            do=f"{_ROWS}; name the file .txt if each line is a prompt",
        ) from error
    if isinstance(row, dict) and _has_pictures(row):
        raise UserError(
            f"{place} has a picture.",
            why="crosstune generate reads text only.",
            do="to see answers about pictures, train with --eval_dataset and --num_samples: the run's report shows them; "
            "or open the result with transformers",
        )
    if isinstance(row, dict) and isinstance(row.get("prompt"), str):
        return make_prompt(row["prompt"], system=system)
    messages = row.get("messages", row.get("prompt")) if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise UserError(
            f"{place} has no prompt.",
            why="a row needs `prompt`, a string, or `messages`, a list of turns with role and content.",
            do=_ROWS,
        )
    try:
        turns = to_conversation({"messages": messages}, "messages")
    except UserError as error:
        raise UserError(f"{place}: {error.message}", why=error.why, do=error.do or _ROWS) from error
    assert not isinstance(turns, str), "only the text format is a string"
    # In a row of training data, the answer is the reference.
    reference = turns.pop()["content"] if turns[-1]["role"] == "assistant" else None
    if not any(turn["role"] == "user" for turn in turns):
        raise UserError(f"{place} has no user message.", do="add one: the model answers it")
    first = [] if turns[0]["role"] in ("system", "developer") else _system(system)
    return Prompt(messages=[*first, *turns], text=None, reference=reference)


def _has_pictures(row: Mapping[str, Any]) -> bool:
    """Return whether a row has pictures in a column or in a message."""
    if any(row.get(name) for name in COLUMNS):
        return True
    turns = row.get("messages", row.get("prompt"))
    contents = (
        [turn.get("content") for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    )
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") in PICTURE_TYPES for part in parts)


def _system(text: str) -> list[Message]:
    return [{"role": "system", "content": text}] if text else []


def json_line(row: dict[str, Any]) -> bytes:
    return f"{to_json(row)}\n".encode()


@dataclass(kw_only=True)
class Conversation:
    """The system message and the turns so far."""

    system: str = ""
    turns: list[Message] = field(default_factory=list)

    def messages(self) -> list[Message]:
        return [*_system(self.system), *self.turns]

    def with_question(self, text: str) -> list[Message]:
        return [*self.messages(), {"role": "user", "content": text}]

    def add(self, question: str, answer: str) -> None:
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        self.turns = []

    def save(self, path: Path) -> None:
        """Write the conversation as one row of a dataset."""
        if not self.turns:
            raise UserError("There is nothing to save yet.")
        if path.exists() and not is_stream(path):
            raise UserError(f"{path} already exists.", do="choose a different file name")
        write_output(path, json_line({"messages": self.messages()}))

    def load(self, path: Path) -> None:
        """Replace this conversation with the first one in a file."""
        try:
            with open_plain(path) as file:
                row = parse_json(file.readline(LINE_LIMIT).removeprefix(codecs.BOM_UTF8), foreign=True)
            turns = to_conversation({"messages": row["messages"]}, "messages")
        except (UserError, OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"Cannot read a conversation from {path}.",
                why=(error.why or error.message) if isinstance(error, UserError) else str(error),
                do="pass a file that /save wrote: a JSON object with `messages` per line",
            ) from error
        assert not isinstance(turns, str), "only the text format is a string"
        has_system = turns[0]["role"] == "system"
        self.system = turns[0]["content"] if has_system else ""
        self.turns = [*turns[has_system:]]
