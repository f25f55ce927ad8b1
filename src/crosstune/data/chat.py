"""A conversation to tokens, with exactly the assistant's tokens marked as supervised."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import numpy as np
from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from crosstune.core.errors import UserError
from crosstune.core.protocols import Example
from crosstune.data.tokenizer import Tokenizer

Message = Mapping[str, str]
Spans = list[tuple[int, int]]

# For models that come without a template: roles on lines of their own, the end token after each answer.
PLAIN_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}Assistant: {{ m.content }}{{ eos_token }}\n"
    "{% else %}{{ m.role | capitalize }}: {{ m.content }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"
)


class Refused(Exception):
    """A template that says no to a conversation."""


def _raise_exception(message: str) -> None:
    raise Refused(message)


@lru_cache(maxsize=8)
def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def render(messages: Sequence[Message], tokenizer: Tokenizer, *, add_generation_prompt: bool) -> str:
    """The text a model sees for a conversation."""
    try:
        return _compile(tokenizer.chat_template or PLAIN_TEMPLATE).render(
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            bos_token=tokenizer.bos_token or "",
            eos_token=tokenizer.eos_token or "",
        )
    except (TemplateError, Refused) as error:
        raise UserError("The chat template cannot render this conversation.", why=str(error)) from error


def encode_conversation(
    messages: Sequence[Message], tokenizer: Tokenizer, *, index: int, whole: bool
) -> Example:
    """Tokens of a conversation; supervised are the assistant's, up to and with the token that ends each answer.

    `whole` puts the loss on everything.
    """
    text = render(messages, tokenizer, add_generation_prompt=False)
    spans = [(0, len(text))] if whole else _answer_spans(messages, text, tokenizer)
    return encode_spans(text, spans, tokenizer, index=index)


def encode_prompt(messages: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
    """Tokens that ask for an answer."""
    return tokenizer.encode(render(messages, tokenizer, add_generation_prompt=True))[0]


def encode_spans(text: str, spans: Spans, tokenizer: Tokenizer, *, index: int) -> Example:
    """Tokens of a text; supervised are those with a character inside a span."""
    ids, offsets = tokenizer.encode(text)
    places = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    supervised = np.zeros(len(ids), dtype=bool)
    for start, end in spans:
        supervised |= (places[:, 0] < end) & (places[:, 1] > start)
    return Example(tokens=np.asarray(ids, dtype=np.int32), supervised=supervised, index=index)


def _answer_spans(messages: Sequence[Message], text: str, tokenizer: Tokenizer) -> Spans:
    """Where each answer stands in the rendered text, found by rendering the conversation up to it."""
    spans: Spans = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:place], tokenizer, add_generation_prompt=True)
        through = render(messages[: place + 1], tokenizer, add_generation_prompt=False)
        if not (text.startswith(before) and text.startswith(through) and len(through) > len(before)):
            raise UserError(
                "This chat template rewrites earlier turns, so its answers cannot be located.",
                why=f"the text up to turn {place + 1} is not the beginning of the whole text.",
                do="train on single answers, or pass --train_on_prompt",
            )
        spans.append((len(before), _end_of_answer(through, len(before), tokenizer.eos_token)))
    return spans


def _end_of_answer(text: str, start: int, eos_token: str | None) -> int:
    """The end of the span: white space that a template writes behind the end token belongs to nobody."""
    stripped = text.rstrip()
    if eos_token and stripped.endswith(eos_token) and len(stripped) > start:
        return len(stripped)
    return len(text)


def as_messages(value: Any) -> list[dict[str, str]]:
    """A conversation as {role, content} messages; anything else is a UserError."""
    if not isinstance(value, list) or not value:
        raise UserError("A conversation must be a list of messages that is not empty.")
    messages: list[dict[str, str]] = []
    for item in value:
        if not isinstance(item, dict) or "role" not in item or "content" not in item:
            raise UserError("Every message needs a role and a content.", why=f"found {_short(item)}")
        if not isinstance(item["content"], str):
            raise UserError("The content of a message must be text.", why=f"found {_short(item['content'])}")
        messages.append({"role": str(item["role"]), "content": item["content"]})
    return messages


def _short(value: Any) -> str:
    words = json.dumps(value, ensure_ascii=False, default=str)
    return words if len(words) <= 80 else words[:77] + "..."
