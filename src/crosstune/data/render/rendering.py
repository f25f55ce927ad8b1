"""Render conversations with the chat template of a tokenizer, and tokenize them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.data.batches.token_batch import Example
from crosstune.data.render.answer_spans import effective_extras, locate_answers, render_text
from crosstune.data.render.types import Message, Rendered, Tools
from crosstune.data.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding


def render(
    messages: Sequence[Message], tokenizer: Tokenizer, *, add_generation_prompt: bool, tools: Tools = None
) -> str:
    """Return the text of a conversation, in which the model may call `tools`."""
    messages, tools = _plain([messages, tools])
    text, _ = render_text(
        messages, tokenizer.chat_tokens, add_generation_prompt=add_generation_prompt, tools=tools
    )
    check_characters(text)
    return text


def render_conversation(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    whole: bool,
    tools: Tools = None,
    extras: Sequence[str] = (),
) -> Rendered:
    """Render a conversation with the spans of its answers and their end tokens, or with one span if `whole`, and find the
    `extras` (keys of the messages, or `tools`) that change the text."""
    messages, tools = _plain([messages, tools])
    tokens = tokenizer.chat_tokens
    text, marks = render_text(messages, tokens, add_generation_prompt=False, tools=tools)
    check_characters(text)
    spans, num_unlocated = [(0, len(text))], 0
    if not whole:
        spans, num_unlocated = locate_answers(messages, text, marks, tokens, tools=tools)
    return Rendered(
        text=text,
        spans=spans,
        num_unlocated=num_unlocated,
        effective_extras=effective_extras(messages, text, tokens, extras, tools=tools),
    )


def encode_conversation(
    messages: Sequence[Message], tokenizer: Tokenizer, *, index: int, whole: bool
) -> Example:
    """Tokenize a conversation. The assistant's tokens are supervised, including the end token of each answer."""
    rendered = render_conversation(messages, tokenizer, whole=whole)
    encoding = tokenizer.encode(rendered.text)
    return Example(
        tokens=np.asarray(encoding.ids, dtype=np.int32),
        supervised=mask_of(encoding, rendered),
        index=index,
    )


def encode_prompt(messages: Sequence[Message], tokenizer: Tokenizer, *, tools: Tools = None) -> list[int]:
    """Tokenize a conversation with the generation prompt."""
    return list(tokenizer.encode(render(messages, tokenizer, add_generation_prompt=True, tools=tools)).ids)


def check_characters(text: str) -> None:
    """Raise a UserError for an unpaired surrogate: no tokenizer can encode it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            "The text contains an unpaired surrogate.",
            why=f"{text[error.start]!a} cannot be encoded as UTF-8.",
            do="write the row again from its source, or correct the chat template if it adds the character",
        ) from error


def mask_of(encoding: Encoding, rendered: Rendered) -> NDArray[np.bool_]:
    """Return the mask of tokens that have a character inside a span."""
    if list(rendered.spans) == [(0, len(rendered.text))]:
        return np.ones(len(encoding.ids), dtype=np.bool_)
    mask = np.zeros(len(encoding.ids), dtype=np.bool_)
    for start, end in rendered.spans:
        first = _token_at(encoding, range(start, end))
        last = _token_at(encoding, range(end - 1, start - 1, -1))
        if first is None or last is None:
            continue
        # One character can be multiple tokens, one for each byte.
        while last + 1 < len(mask) and _starts_before(encoding, last + 1, end):
            last += 1
        mask[first : last + 1] = True
    return mask


def _token_at(encoding: Encoding, characters: range) -> int | None:
    """Return the token of the first of these characters that has one; tokenizers drop some whitespace."""
    for character in characters:
        token = encoding.char_to_token(character)
        if token is not None:
            return int(token)
    return None


def _starts_before(encoding: Encoding, token: int, end: int) -> bool:
    place = encoding.token_to_chars(token)
    return place is not None and place[0] < end and place[1] > place[0]


def _plain(values: list[Any]) -> Any:
    """Convert values to JSON types, others (such as dates from Parquet) to strings: a template gets no Python objects."""
    try:
        return json.loads(json.dumps(values, ensure_ascii=False, default=str))
    except RecursionError as error:
        raise UserError("The values of this conversation are nested too deeply.") from error
