"""Compile chat templates in jinja's sandbox and render conversations with them.

This runs in the process of `render_worker`, where the system limits time and memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from crosstune.data.render_types import Message, Span
from crosstune.data.template_limits import LONGEST_TEMPLATE, OverLimit, most_characters

# The date that templates get: the tokens of a run must not depend on the day.
DAY = datetime(2025, 1, 1)

# Unicode noncharacters, reserved for internal use; no text contains them.
_BEGIN, _END = "\ufdd0", "\ufdd1"
# Errors that the code of a template can raise, besides jinja's own.
FAULTS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    AssertionError,
    NotImplementedError,
)


class Refused(Exception):
    """A template rejected a conversation with `raise_exception`."""


class _Generation(Extension):
    """The tag `{% generation %} ... {% endgeneration %}`, which marks the text that the model writes."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark", [])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def make_environment() -> ImmutableSandboxedEnvironment:
    """Return the environment of chat templates: that of transformers, without what gives another text each time."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters.pop("random")
    environment.globals.pop("lipsum")
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _format_day
    return environment


class ChatTemplate:
    """A compiled template. `marks_answers` is true when it has `{% generation %}` tags."""

    def __init__(self, source: str) -> None:
        if len(source) > LONGEST_TEMPLATE:
            raise OverLimit(f"it is longer than {LONGEST_TEMPLATE >> 10} KiB")
        self._template = make_environment().from_string(source)
        self._num_characters = len(source)
        self.marks_answers = "endgeneration" in source

    def render(self, messages: Sequence[Message], **variables: Any) -> tuple[str, list[Span]]:
        """Return the text and the spans marked in it."""
        size = sum(len(str(value)) for message in messages for value in message.values())
        size += len(str(variables.get("tools")))
        most = most_characters(input_characters=size, template_characters=self._num_characters)
        pieces = []
        total = 0
        for piece in self._template.generate(messages=list(messages), **variables):
            total += len(piece)
            if total > most:
                raise OverLimit(f"it writes more than {most:,} characters for a conversation of {size:,}")
            pieces.append(piece)
        return _take_marks("".join(pieces))


@lru_cache(maxsize=16)
def load_template(source: str) -> ChatTemplate:
    """Compile a template, or return it as compiled before."""
    return ChatTemplate(source)


def _take_marks(text: str) -> tuple[str, list[Span]]:
    if _BEGIN not in text:
        return text, []
    plain: list[str] = []
    spans: list[Span] = []
    length, start = 0, None
    for piece in text.replace(_END, _BEGIN + _END).split(_BEGIN):
        closes = piece.startswith(_END)
        if closes and start is not None:
            spans.append((start, length))
            start = None
        body = piece.removeprefix(_END)
        if not closes and plain:
            start = length
        plain.append(body)
        length += len(body)
    return "".join(plain), [span for span in spans if span[1] > span[0]]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers' `tojson` does, which escapes nothing for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise Refused(message)


def _format_day(form: str) -> str:
    return DAY.strftime(form)
