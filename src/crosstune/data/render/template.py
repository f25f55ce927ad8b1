"""Compile chat templates in jinja's sandbox and render conversations with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from crosstune.data.render.template_marks import Generation, Marks, extract_marks
from crosstune.data.render.types import REASONING_KEYS, Message

LONGEST_TEMPLATE = 256 << 10
"""In characters; templates of published models have a few thousand, the longest about 30,000."""
DAY = datetime(2025, 1, 1)
"""The date for templates: the tokens of a run must not depend on the day."""


class Rejected(Exception):
    """A template rejected a conversation with `raise_exception`, is too long, or writes too much text."""


def make_environment() -> ImmutableSandboxedEnvironment:
    """Return the environment of transformers' chat templates, without random filters."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters.pop("random")
    environment.globals.pop("lipsum")
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = DAY.strftime
    return environment


class ChatTemplate:
    """A compiled template. `marks_answers` is true when it has `{% generation %}` tags."""

    def __init__(self, source: str) -> None:
        if len(source) > LONGEST_TEMPLATE:
            raise Rejected(f"it is longer than {LONGEST_TEMPLATE >> 10} KiB")
        environment = make_environment()
        generation = environment.extensions[Generation.identifier]
        assert isinstance(generation, Generation)
        self._marker = generation.marker
        self._template = environment.from_string(generation.mark_loops(environment.parse(source)))
        self._num_characters = len(source)
        self.marks_answers = "endgeneration" in source

    def render(self, messages: Sequence[Message], **variables: Any) -> tuple[str, Marks]:
        """Return the text, with its marked spans and the spans of each message."""
        shown = [_with_reasoning(message) for message in messages]
        size = len(repr(variables.get("tools")))
        size += sum(len(str(value)) for message in shown for value in message.values())
        most = (64 << 10) + 16 * size + 4 * self._num_characters
        self._marker.start(shown)
        pieces = []
        total = 0
        for piece in self._template.generate(messages=shown, **variables):
            total += len(piece)
            if total > most:
                raise Rejected(f"it writes more than {most:,} characters for a conversation of {size:,}")
            pieces.append(piece)
        return extract_marks("".join(pieces))


load_template = lru_cache(maxsize=16)(ChatTemplate)


def _with_reasoning(message: Message) -> dict[str, Any]:
    """Return a copy of the message with its reasoning under the names that templates read, as in transformers."""
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
    """Write JSON as transformers' `tojson` does: without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise Rejected(message)
