"""Render chat templates in a sandbox with limits, after a trial in a child process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from crosstune.core.errors import UserError
from crosstune.data.template_limits import Budget, GuardedEnvironment, OverLimit

Message = Mapping[str, Any]
Tools = Sequence[Any] | None
Span = tuple[int, int]

PROBE_SECONDS = 10.0
LONGEST_TEMPLATE = 1 << 20
# The date that templates get: the tokens of a run must not depend on the day.
DAY = datetime(2025, 1, 1)

# Unicode noncharacters, reserved for internal use; no text contains them.
_BEGIN, _END = "\ufdd0", "\ufdd1"
# Errors that the expressions of a template can raise, besides jinja's own.
FAULTS = (TemplateError, ArithmeticError, TypeError, ValueError, LookupError, AttributeError, RecursionError)


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


class ChatTemplate:
    """A compiled template. `marks_answers` is true when it has `{% generation %}` tags."""

    def __init__(self, source: str) -> None:
        if len(source) > LONGEST_TEMPLATE:
            raise OverLimit(f"it is longer than {LONGEST_TEMPLATE >> 20} MiB")
        self._budget = Budget()
        environment = GuardedEnvironment(
            self._budget,
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = self._to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _format_day
        self._budget.start(input_characters=len(source))
        self._template = environment.from_string(source)
        self.marks_answers = "endgeneration" in source

    def render(self, messages: Sequence[Message], **variables: Any) -> tuple[str, list[Span]]:
        """Return the text and the spans marked in it."""
        size = sum(len(str(value)) for message in messages for value in message.values())
        size += len(str(variables.get("tools")))
        self._budget.start(input_characters=size)
        pieces = []
        total = 0
        for piece in self._template.generate(messages=list(messages), **variables):
            total += len(piece)
            self._budget.check_size(total)
            pieces.append(piece)
        return _take_marks("".join(pieces))

    def _to_json(self, value: Any, indent: int | None = None, **options: Any) -> str:
        if isinstance(indent, int) and indent > 16:
            raise OverLimit("it indents JSON by more than 16 characters")
        return json.dumps(self._budget.check_value(value), ensure_ascii=False, indent=indent, **options)


def render_text(
    source: str, messages: Sequence[Message], *, is_ours: bool = False, **variables: Any
) -> tuple[str, list[Span]]:
    """Render a conversation; raise a UserError when the template fails. `is_ours` skips the child process."""
    template = load_template(source, is_ours=is_ours)
    try:
        return template.render(messages, **variables)
    except (*FAULTS, Refused, OverLimit) as error:
        raise UserError("The chat template cannot render this conversation.", why=_reason(error)) from error


@lru_cache(maxsize=16)
def load_template(source: str, *, is_ours: bool = False) -> ChatTemplate:
    if not is_ours:
        _probe_in_child(source)
    try:
        return ChatTemplate(source)
    except (*FAULTS, OverLimit) as error:
        raise UserError("The chat template of this model cannot be read.", why=_reason(error)) from error


def _probe_in_child(source: str) -> None:
    """Compile and render the template once in a process with system limits on time and memory, which also hold
    where the guards in this process have a gap."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "crosstune.data.template_probe"],
            input=source.encode(errors="replace"),
            capture_output=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            "The chat template of this model does not finish.",
            why=f"it was stopped after {PROBE_SECONDS:g} seconds on a conversation of four turns.",
            do="repair or replace chat_template.jinja in the model's folder",
        ) from error
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(
            "The chat template of this model cannot be used.",
            why=lines[-1]
            if lines
            else f"it took more time or memory than allowed (status {done.returncode}).",
            do="repair or replace chat_template.jinja in the model's folder",
        )


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


def _raise_exception(message: str) -> None:
    raise Refused(message)


def _format_day(form: str) -> str:
    if len(form) > 100:
        raise OverLimit("it uses a date format of more than 100 characters")
    return DAY.strftime(form)


def _reason(error: Exception) -> str:
    kind = "" if isinstance(error, (Refused, OverLimit)) else f"{type(error).__name__}: "
    return f"{kind}{' '.join(str(error).split())[:300]}"
