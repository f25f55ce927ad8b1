"""Hold a conversation with a model, and keep it in a file."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from pathlib import Path

from crosstune.core.errors import UserError
from crosstune.core.json_files import LINE_LIMIT, parse_json
from crosstune.core.plain_files import UnreadableFile, open_plain
from crosstune.data.formats import to_conversation
from crosstune.data.render_types import Message
from crosstune.results.prompt_file import check_output, open_output, write_row


@dataclass(kw_only=True)
class Conversation:
    """The system message and the turns so far."""

    system: str = ""
    turns: list[Message] = field(default_factory=list)

    def messages(self) -> list[Message]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.turns]

    def with_question(self, text: str) -> list[Message]:
        return [*self.messages(), {"role": "user", "content": text}]

    def add(self, question: str, answer: str) -> None:
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        self.turns = []

    def save(self, path: Path) -> None:
        """Write the conversation as one row of a data set."""
        if not self.turns:
            raise UserError("There is nothing to save yet.")
        check_output(path, do="name another file")
        with open_output(path) as file:
            write_row(file, {"messages": self.messages()})

    def load(self, path: Path) -> None:
        """Replace this conversation with the first one in a file."""
        try:
            with open_plain(path) as file:
                row = parse_json(file.readline(LINE_LIMIT).removeprefix(codecs.BOM_UTF8), foreign=True)
            turns = to_conversation({"messages": row["messages"]}, "messages")
        except (UnreadableFile, OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"Cannot read a conversation from {path}.",
                why=error.why if isinstance(error, UnreadableFile) else str(error),
                do="give a file that /save wrote: a JSON object with `messages` per line",
            ) from error
        assert not isinstance(turns, str), "only the format text is a text"
        has_system = turns[0]["role"] == "system"
        self.system = turns[0]["content"] if has_system else ""
        self.turns = [*turns[1:]] if has_system else [*turns]
