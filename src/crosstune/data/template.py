"""The one renderer of chat templates: sandboxed, bounded, tried out in a child process before its first use here."""

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
# A template may ask for the date. It gets this one always: the tokens of a run must not depend on its day.
DAY = datetime(2025, 1, 1)

# Characters that Unicode sets aside for such use within a program; no text has them.
_BEGIN, _END = "\ufdd0", "\ufdd1"
# Whatever a template's own arithmetic can raise, beside jinja's errors.
FAULTS = (TemplateError, ArithmeticError, TypeError, ValueError, LookupError, AttributeError, RecursionError)


class Refused(Exception):
    """A template that says no to a conversation."""


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: the text inside is what the model is to write."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark", [])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


class ChatTemplate:
    """A compiled template. `marks_answers`: it says itself what is the model's to write."""

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
        """The text, and the spans it has marked."""
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
    source: str, messages: Sequence[Message], *, familiar: bool = False, **variables: Any
) -> tuple[str, list[Span]]:
    """Render a conversation; a template that cannot is a UserError. `familiar` skips the child process."""
    template = load_template(source, familiar=familiar)
    try:
        return template.render(messages, **variables)
    except (*FAULTS, Refused, OverLimit) as error:
        raise UserError("The chat template cannot render this conversation.", why=_reason(error)) from error


@lru_cache(maxsize=16)
def load_template(source: str, *, familiar: bool = False) -> ChatTemplate:
    if not familiar:
        _try_apart(source)
    try:
        return ChatTemplate(source)
    except (*FAULTS, OverLimit) as error:
        raise UserError("The chat template of this model cannot be read.", why=_reason(error)) from error


def _try_apart(source: str) -> None:
    """Compile and render it once in a process that the system stops when it takes too much: the guards here bound
    what we have thought of, the limits there bound everything."""
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
            "The chat template of this model does not come to an end.",
            why=f"it was stopped after {PROBE_SECONDS:g} seconds on a conversation of four turns.",
            do="mend or replace chat_template.jinja in the model's folder",
        ) from error
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(
            "The chat template of this model cannot be used.",
            why=words[-1]
            if words
            else f"it took more time or memory than allowed (status {done.returncode}).",
            do="mend or replace chat_template.jinja in the model's folder",
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
        raise OverLimit("it asks for a date in a form of more than 100 characters")
    return DAY.strftime(form)


def _reason(error: Exception) -> str:
    kind = "" if isinstance(error, (Refused, OverLimit)) else f"{type(error).__name__}: "
    return f"{kind}{' '.join(str(error).split())[:300]}"
