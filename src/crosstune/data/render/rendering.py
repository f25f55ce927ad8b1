"""Render conversations with the chat template of a tokenizer, and tokenize them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from crosstune.core.errors import UserError
from crosstune.data.batches.token_batch import Example
from crosstune.data.read.pictures import Picture
from crosstune.data.render.answer_spans import (
    OPENED_REASONING,
    effective_extras,
    find_prompt_ends,
    find_switches,
    locate_answers,
    opens_reasoning,
    render_text,
)
from crosstune.data.render.encoding import Encoded, begins_with, encode_rendered, expand_pictures
from crosstune.data.render.template_marks import Marks
from crosstune.data.render.types import EXCLUDED, NO_LOSS, Message, Rendered, Span, Tools
from crosstune.data.tokens.tokenizer import Tokenizer

_CHARACTERS_SHOWN = 40


def render(
    messages: Sequence[Message], tokenizer: Tokenizer, *, add_generation_prompt: bool, tools: Tools = None
) -> str:
    """Return the text of a conversation, in which the model may call `tools`."""
    messages, tools = _plain([messages, tools])
    text, _ = render_text(messages, tokenizer, add_generation_prompt=add_generation_prompt, tools=tools)
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
    text, marks = render_text(messages, tokenizer, add_generation_prompt=False, tools=tools)
    check_characters(text)
    num_unlocated = 0
    answers: Sequence[Span]
    if whole:
        spans, answers = _without_excluded(messages, text, marks, tokenizer, tools=tools)
    else:
        spans, num_unlocated = locate_answers(messages, text, marks, tokenizer, tools=tools)
        answers = spans
    switches = find_switches(messages, tokenizer) if tokenizer.data_rules > 4 else ()
    ends = find_prompt_ends(text, answers, tokenizer, switches=switches)
    others = _without_loss(messages, text, marks, tokenizer, tools=tools)
    return Rendered(
        text=text,
        spans=spans,
        first_answer=answers[0][0] if answers else 0,
        num_unlocated=num_unlocated,
        prompt_ends=[*ends, *find_prompt_ends(text, others, tokenizer, switches=switches)],
        lacks_reasoning=bool(answers and not ends and opens_reasoning(tokenizer)),
        effective_extras=effective_extras(messages, text, tokenizer, extras, tools=tools),
    )


def _without_loss(
    messages: Sequence[Message], text: str, marks: Marks, tokenizer: Tokenizer, *, tools: Tools
) -> Sequence[Span]:
    """Return the spans of the answers that carry no loss; none if they cannot be located."""
    excluded = [message["role"] == "assistant" and bool(message.get(NO_LOSS)) for message in messages]
    if not any(excluded):
        return ()
    turned = [{**message, NO_LOSS: not out} for message, out in zip(messages, excluded, strict=True)]
    try:
        return locate_answers(turned, text, marks, tokenizer, tools=tools)[0]
    except UserError:
        return ()


def _without_excluded(
    messages: Sequence[Message], text: str, marks: Marks, tokenizer: Tokenizer, *, tools: Tools
) -> tuple[list[Span], Sequence[Span]]:
    """Return the spans of a whole text without the turns that the data excludes, and the spans of its answers."""
    excluded = [message.get(NO_LOSS) == EXCLUDED for message in messages]
    cut: list[Span] = []
    if any(excluded):
        turned = [{**message, NO_LOSS: not out} for message, out in zip(messages, excluded, strict=True)]
        cut, _ = locate_answers(turned, text, marks, tokenizer, tools=tools)
    starts = [0, *(end for _, end in cut)]
    ends = [*(start for start, _ in cut), len(text)]
    kept = [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]
    try:
        return kept, locate_answers(messages, text, marks, tokenizer, tools=tools)[0]
    except UserError:  # the loss does not need them
        return kept, ()


def encode_conversation(
    messages: Sequence[Message], tokenizer: Tokenizer, *, index: int, whole: bool, tools: Tools = None
) -> Example:
    """Tokenize a conversation. The assistant's tokens are supervised, including the end token of each answer."""
    rendered = render_conversation(messages, tokenizer, whole=whole, tools=tools)
    found = encode_rendered(rendered, tokenizer.encode(rendered.text), tokenizer, compare_all=True)
    return Example(tokens=found.tokens, supervised=found.supervised, index=index)


def encode_prompt(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    tools: Tools = None,
    pictures: Sequence[Picture] = (),
) -> list[int]:
    """Tokenize a conversation with the generation prompt, its earlier answers as in a training row."""
    encoded = _encode_prompt(messages, tokenizer, tools=tools)
    return expand_pictures(encoded, pictures, tokenizer).tokens.tolist()


def _encode_prompt(messages: Sequence[Message], tokenizer: Tokenizer, *, tools: Tools) -> Encoded:
    text = render(messages, tokenizer, add_generation_prompt=True, tools=tools)
    encoding = tokenizer.encode(text)
    whole = Encoded(np.asarray(encoding.ids, dtype=np.int32), np.zeros(len(encoding.ids), dtype=np.bool_))
    if not any(message["role"] == "assistant" for message in messages):
        return whole
    try:
        told = render_conversation(messages, tokenizer, whole=False, tools=tools)
    except UserError:  # the template rejects the conversation without the prompt, or changes the answers
        return whole
    ends = [end for end in told.prompt_ends if text.startswith(told.text[:end])]
    history = Rendered(text=text, spans=(), prompt_ends=ends)
    compare_all = prompts_change_tokens(tokenizer)
    return encode_rendered(history, encoding, tokenizer, compare_all=compare_all)


def prompts_have_bos(tokenizer: Tokenizer) -> bool:
    """Return True if the tokenizer adds a BOS token to text, and the chat template writes it too."""
    try:
        prompt = render([{"role": "user", "content": "Hello"}], tokenizer, add_generation_prompt=True)
    except UserError:  # the template expects different turns
        return tokenizer.adds_bos
    return tokenizer.adds_bos and prompt.startswith(tokenizer.leading_bos)


@lru_cache(maxsize=8)
def prompts_change_tokens(tokenizer: Tokenizer) -> bool:
    """Return True if the prompt of a short question has different tokens with an answer after it. A prompt without a header
    ends with the question, which may end in white space."""
    questions = ("Hello", "Hello ", "Hello\n\n") if tokenizer.data_rules > 3 else ("Hello",)
    for question, answer in product(questions, ("Good", "1", '"')):
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        try:
            rendered = render_conversation(turns, tokenizer, whole=False)
        except UserError:  # the template expects different turns; the data rows report their own errors
            return False
        encoding = tokenizer.encode(rendered.text)
        if not all(begins_with(encoding, rendered.text[:end], tokenizer) for end in rendered.prompt_ends):
            return True
    return False


def prompt_mismatch(tokenizer: Tokenizer) -> tuple[str, str] | None:
    """Return the end of a generation prompt and the text of a training row in its place; None if the row begins with the
    prompt. Opened reasoning at the end of the prompt is not compared, since some rows have no reasoning."""
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good"}]
    try:
        prompt = render(turns[:1], tokenizer, add_generation_prompt=True)
        rendered = render_conversation(turns, tokenizer, whole=False)
    except UserError:  # the template expects different turns; the data rows report their own errors
        return None
    row, opened = rendered.text, OPENED_REASONING.search(prompt)
    own = prompt[: opened.start()] if opened and not opened["closed"] else prompt
    # A header that is neither in the prompt nor in the loss is never generated.
    if row.startswith(own) and all(start <= len(prompt) for start, _ in rendered.spans[:1]):
        return None
    same = next(
        (place for place, pair in enumerate(zip(prompt, row, strict=False)) if len({*pair}) > 1),
        min(len(prompt), len(row)),
    )
    first = max(0, same - _CHARACTERS_SHOWN // 2)
    return prompt[first:][:_CHARACTERS_SHOWN], row[first:][:_CHARACTERS_SHOWN]


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


def _plain(values: list[Any]) -> Any:
    """Convert values to JSON types, and others, such as dates from Parquet, to strings: templates receive no Python objects."""
    try:
        return json.loads(json.dumps(values, ensure_ascii=False, default=str))
    except RecursionError as error:
        raise UserError("The values of this conversation are nested too deeply.") from error
