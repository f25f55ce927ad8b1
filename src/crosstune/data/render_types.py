"""Define what is sent to the process that renders chat templates, and what comes back."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crosstune.core.errors import UserError

Message = Mapping[str, Any]
Tools = Sequence[Any] | None
Span = tuple[int, int]

REQUEST_HEADER = struct.Struct("<QQ")
"""The length of the body, and the memory that rendering may take."""
REPLY_HEADER = struct.Struct("<Q")
EXIT_OUT_OF_MEMORY = 3

NO_LOSS = "no_loss"
"""Set in an assistant's turn that is part of a prompt."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ChatTokens:
    """The chat template of a model and the special tokens that it writes."""

    chat_template: str | None
    template_file: str = ""
    """The file of the template, for error messages."""
    named_tokens: tuple[tuple[str, str], ...] = ()
    """The special tokens that templates know by name: (name, text)."""
    leading_bos: str = ""
    special: tuple[str, ...] = ()
    """The texts of all special tokens."""
    stop_tokens: tuple[str, ...] = ()
    """The texts of the tokens at which the model stops, longest first."""

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> ChatTokens:
        """Return the object of which `asdict` went through JSON."""
        named = tuple((name, text) for name, text in fields["named_tokens"])
        lists = {name: tuple(fields[name]) for name in ("special", "stop_tokens")}
        return cls(**fields | lists | {"named_tokens": named})


@dataclass(frozen=True, kw_only=True)
class RenderRow:
    """A conversation to render, as JSON."""

    body: str
    num_messages: int

    @classmethod
    def of(
        cls, messages: Sequence[Message], *, kind: str, tools: Tools = None, extras: Sequence[str] = ()
    ) -> RenderRow:
        """Encode a conversation. The kind is `answers` (with their spans), `whole` (one span), `text`, or `prompt` (the
        text with the generation prompt)."""
        row = {"kind": kind, "messages": messages, "tools": tools, "extras": extras}
        try:
            # Values that JSON does not have, such as dates from Parquet, are written as their text.
            body = json.dumps(row, ensure_ascii=False, default=str)
        except RecursionError as error:
            raise UserError("The values of this conversation are nested too deeply.") from error
        return cls(body=body, num_messages=len(messages))


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A text and the spans of it that carry loss."""

    text: str
    spans: Sequence[Span]
    num_unlocated: int = 0
    """Number of answers that cannot be found because the template changes them; they carry no loss."""
    effective_extras: frozenset[str] = frozenset()
    """Those of the request's `extras` that change the text."""


def template_error(template_file: str, verb: str, *, why: str) -> UserError:
    """Return the error of a template that cannot be read or rendered."""
    return UserError(
        f"The chat template {template_file or 'of this model'} cannot {verb}.",
        why=why,
        do="check the conversation, and repair or replace the template",
    )
