"""Render conversations to text and find the exact character spans of the assistant's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.data.formats import NO_LOSS
from crosstune.data.template import Message, Span, Tools, load_template, render_text
from crosstune.data.token_batch import Example
from crosstune.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding

# For models without a chat template: each turn on its own line, the end token after each answer.
PLAIN_TEMPLATE = (
    "{{ leading_bos }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}Assistant: {{ m.content }}{{ eos_token }}\n"
    "{% else %}{{ m.role | capitalize }}: {{ m.content }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def plain_template(tokenizer: Tokenizer) -> str:
    """Return the plain template for other tools, which do not define `leading_bos`."""
    return PLAIN_TEMPLATE.replace("{{ leading_bos }}", "{{ bos_token }}" if tokenizer.leading_bos else "")


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A text and the spans of it that carry loss."""

    text: str
    spans: Sequence[Span]
    num_unlocated: int = 0
    """Number of answers that cannot be found because the template changes them; they carry no loss."""


def render(
    messages: Sequence[Message], tokenizer: Tokenizer, *, add_generation_prompt: bool, tools: Tools = None
) -> str:
    """Return the text of a conversation, in which the model may call `tools`."""
    return _render(messages, tokenizer, add_generation_prompt=add_generation_prompt, tools=tools)[0]


def render_conversation(
    messages: Sequence[Message], tokenizer: Tokenizer, *, whole: bool, tools: Tools = None
) -> Rendered:
    """Render a conversation with the spans of its answers and their end tokens, or with one span if `whole`."""
    text, marked = _render(messages, tokenizer, add_generation_prompt=False, tools=tools)
    if whole:
        return Rendered(text=text, spans=[(0, len(text))])
    if tokenizer.chat_template and load_template(tokenizer.chat_template).marks_answers:
        return Rendered(text=text, spans=_with_loss(messages, marked))
    places = [place for place, message in enumerate(messages) if _is_answer(message)]
    found = [_locate(messages, place, text, tokenizer, tools) for place in places]
    spans = [span for span in found if span is not None]
    if places and not spans:
        raise UserError(
            "The answers cannot be found in the text that the chat template renders.",
            why="the template changes the answers or the text around them.",
            do="pass --train_on_prompt, or mark the answers in the template with {% generation %}",
        )
    return Rendered(text=text, spans=spans, num_unlocated=len(places) - len(spans))


def _is_answer(message: Message) -> bool:
    """Return whether a message is an answer to learn, not one that a prompt quotes."""
    return message["role"] == "assistant" and not message.get(NO_LOSS)


def _with_loss(messages: Sequence[Message], marked: Sequence[Span]) -> Sequence[Span]:
    """Return the marked spans without those of answers that are part of the prompt."""
    answers = [message for message in messages if message["role"] == "assistant"]
    if all(map(_is_answer, answers)):
        return marked
    if len(marked) != len(answers):
        raise UserError(
            "The completion cannot be told from the answers in its prompt.",
            why=f"the chat template marks {len(marked)} parts for {len(answers)} answers.",
        )
    return [span for span, message in zip(marked, answers, strict=True) if _is_answer(message)]


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
    """Return the tokens of a conversation with the generation prompt."""
    return list(tokenizer.encode(render(messages, tokenizer, add_generation_prompt=True, tools=tools)).ids)


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
        # One character can be several tokens, one for each of its bytes.
        while last + 1 < len(mask) and _starts_before(encoding, last + 1, end):
            last += 1
        mask[first : last + 1] = True
    return mask


def _token_at(encoding: Encoding, characters: range) -> int | None:
    """Return the token of the first of these characters that has one; tokenizers drop some white space."""
    for character in characters:
        token = encoding.char_to_token(character)
        if token is not None:
            return int(token)
    return None


def _starts_before(encoding: Encoding, token: int, end: int) -> bool:
    place = encoding.token_to_chars(token)
    return place is not None and place[0] < end and place[1] > place[0]


def _render(
    messages: Sequence[Message], tokenizer: Tokenizer, *, add_generation_prompt: bool, tools: Tools
) -> tuple[str, list[Span]]:
    return render_text(
        tokenizer.chat_template or PLAIN_TEMPLATE,
        messages,
        is_ours=not tokenizer.chat_template,
        add_generation_prompt=add_generation_prompt,
        bos_token=tokenizer.bos_token or "",
        eos_token=tokenizer.eos_token or "",
        leading_bos=tokenizer.leading_bos,
        # Passed even when None, as in transformers: a template may test them.
        tools=tools,
        documents=None,
    )


def _locate(
    messages: Sequence[Message], place: int, text: str, tokenizer: Tokenizer, tools: Tools
) -> Span | None:
    """Return the span of an answer in the whole text, from the end of its prompt to its end token.

    Both ends are found by rendering the conversation up to that point. Some templates treat earlier turns differently
    from the last one, for example by removing the reasoning. They are rendered a second time with another answer in its
    place: the text that stays the same before and after it is not the answer.
    """
    prompt = _render_part(messages[:place], tokenizer, add_generation_prompt=True, tools=tools)
    start, end = len(prompt) if prompt and text.startswith(prompt) else None, None
    through: str | None = text
    if place + 1 < len(messages):
        through = _render_part(messages[: place + 1], tokenizer, add_generation_prompt=False, tools=tools)
    if start is not None and through and text.startswith(through) and len(through) > start:
        end = _without_tail(through, start, tokenizer)
    if start is not None and end is not None and _writes_prompt(tokenizer):
        return start, end
    around = _around(messages, place, text, tokenizer, tools)
    if around is None:
        return (start, end) if start is not None and end is not None else None
    before, behind = around
    if start is None or (text[start:before].strip() and not _writes_prompt(tokenizer)):
        start = before
    return start, end if end is not None else _with_end_token(text, behind, tokenizer)


def _render_part(
    messages: Sequence[Message], tokenizer: Tokenizer, *, add_generation_prompt: bool, tools: Tools
) -> str | None:
    """Render a part of a conversation; return None when the template refuses it, as it may take whole ones only."""
    try:
        return render(messages, tokenizer, add_generation_prompt=add_generation_prompt, tools=tools)
    except UserError:
        return None


def _around(
    messages: Sequence[Message], place: int, text: str, tokenizer: Tokenizer, tools: Tools
) -> Span | None:
    """Return the span of an answer's content: the text that changes when the content is replaced."""
    placeholder = _placeholder(messages)
    changed = [*messages]
    # Tool calls are part of an answer, so they are removed too.
    kept = {key: value for key, value in messages[place].items() if key != "tool_calls"}
    changed[place] = {**kept, "content": placeholder}
    other = _render_part(changed, tokenizer, add_generation_prompt=False, tools=tools)
    before, found, behind = other.partition(placeholder) if other else ("", "", "")
    if not found or placeholder in behind or len(before) + len(behind) > len(text):
        return None
    if not (text.startswith(before) and text.endswith(behind)):
        return None
    return len(before), len(text) - len(behind)


def _placeholder(messages: Sequence[Message]) -> str:
    for number in count():
        text = f"StandIn{number}Answer"
        if not any(text in message["content"] for message in messages):
            return text
    raise AssertionError("count() does not end")


def _without_tail(text: str, start: int, tokenizer: Tokenizer) -> int:
    """Return the end of an answer, without white space that the template writes after the end token."""
    stripped = text.rstrip()
    if len(stripped) > start and stripped.endswith(_end_tokens(tokenizer)):
        return len(stripped)
    return len(text)


def _with_end_token(text: str, end: int, tokenizer: Tokenizer) -> int:
    """Return the end of an answer that other turns follow: after its end token, if there is one."""
    skipped = end + len(text[end:]) - len(text[end:].lstrip())
    for token in _end_tokens(tokenizer):
        if text.startswith(token, skipped):
            return skipped + len(token)
    return end


@lru_cache(maxsize=8)
def _end_tokens(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the special tokens, longest first, so that none is matched by its own prefix."""
    tokens = {*tokenizer.special, tokenizer.eos_token or ""} - {""}
    return tuple(sorted(tokens, key=len, reverse=True)) or ("\0",)


@lru_cache(maxsize=8)
def _writes_prompt(tokenizer: Tokenizer) -> bool:
    """Return whether the template writes a generation prompt. Without one it may still name the speaker."""
    turn = [{"role": "user", "content": "Hello"}]
    texts = [render(turn, tokenizer, add_generation_prompt=asks) for asks in (False, True)]
    return texts[0] != texts[1]
