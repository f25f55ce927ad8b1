"""Render chat templates in a sandbox with limits, after a trial in a child process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from crosstune.core.errors import UserError
from crosstune.data.template_limits import Budget, GuardedEnvironment, OverLimit
from crosstune.data.template_marks import Generation, Marks

Message = Mapping[str, Any]
Tools = Sequence[Any] | None

PROBE_SECONDS = 10.0
LONGEST_TEMPLATE = 1 << 20
# The date that templates get: the tokens of a run must not depend on the day.
DAY = datetime(2025, 1, 1)

# The names under which data sets keep the reasoning of an answer; most templates read the first one.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
# Errors that the expressions of a template can raise, besides jinja's own.
FAULTS = (TemplateError, ArithmeticError, TypeError, ValueError, LookupError, AttributeError, RecursionError)


class Refused(Exception):
    """A template rejected a conversation with `raise_exception`."""


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
            extensions=["jinja2.ext.loopcontrols", Generation],
        )
        environment.filters["tojson"] = self._to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _format_day
        self._budget.start(input_characters=len(source))
        generation = environment.extensions[Generation.identifier]
        assert isinstance(generation, Generation)
        self._marker = generation.marker
        self._template = environment.from_string(generation.mark_loops(environment.parse(source)))
        self.marks_answers = "endgeneration" in source

    def render(self, messages: Sequence[Message], **variables: Any) -> tuple[str, Marks]:
        """Return the text, and which parts of it are marked or written by which message."""
        shown = [_with_reasoning(message) for message in messages]
        tools = repr(variables.get("tools"))
        size = sum(len(str(value)) for message in shown for value in message.values())
        self._budget.start(input_characters=size + len(tools))
        self._marker.start(shown, tools)
        pieces = []
        total = 0
        for piece in self._template.generate(messages=shown, **variables):
            total += len(piece)
            self._budget.check_size(total)
            pieces.append(piece)
        return self._marker.take("".join(pieces))

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Write JSON without escaping HTML, with the arguments that the filter has in transformers."""
        if (indent if isinstance(indent, int) else len(indent or "")) > 16:
            raise OverLimit("it indents JSON by more than 16 characters")
        if any(len(separator) > 16 for separator in separators or ()):
            raise OverLimit("it separates JSON by more than 16 characters")
        self._budget.check_value(value)
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )


def render_text(
    source: str, messages: Sequence[Message], *, is_ours: bool = False, **variables: Any
) -> tuple[str, Marks]:
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


def _with_reasoning(message: Message) -> dict[str, Any]:
    """Return a copy of the message with its reasoning under the names that templates read, as in transformers."""
    for key in REASONING_KEYS:
        if message.get(key) is not None:
            reasoning = message[key]
            break
    else:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _raise_exception(message: str) -> None:
    raise Refused(message)


def _format_day(form: str) -> str:
    if len(form) > 100:
        raise OverLimit("it uses a date format of more than 100 characters")
    return DAY.strftime(form)


def _reason(error: Exception) -> str:
    kind = "" if isinstance(error, (Refused, OverLimit)) else f"{type(error).__name__}: "
    return f"{kind}{' '.join(str(error).split())[:300]}"
