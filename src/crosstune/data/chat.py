"""A conversation to text, with exactly the characters of the assistant's answers known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.data.template import Message, Span, Tools, load_template, render_text
from crosstune.data.token_batch import Example
from crosstune.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding

# For models that come without a template: roles on lines of their own, the end token after each answer.
PLAIN_TEMPLATE = (
    "{{ leading_bos }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}Assistant: {{ m.content }}{{ eos_token }}\n"
    "{% else %}{{ m.role | capitalize }}: {{ m.content }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def plain_template(tokenizer: Tokenizer) -> str:
    """The same for other tools, which know no `leading_bos`."""
    return PLAIN_TEMPLATE.replace("{{ leading_bos }}", "{{ bos_token }}" if tokenizer.leading_bos else "")


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A text and the parts of it that are to be learned."""

    text: str
    spans: Sequence[Span]
    num_unlocated: int = 0
    """Answers that the template has changed so much that their place is not known; they carry no loss."""


def render(
    messages: Sequence[Message], tokenizer: Tokenizer, *, add_generation_prompt: bool, tools: Tools = None
) -> str:
    """The text a model sees for a conversation, in which it may call `tools`."""
    return _render(messages, tokenizer, add_generation_prompt=add_generation_prompt, tools=tools)[0]


def render_conversation(
    messages: Sequence[Message], tokenizer: Tokenizer, *, whole: bool, tools: Tools = None
) -> Rendered:
    """A conversation and the spans of its answers, each with the token that ends it. `whole`: all of it is a span."""
    text, marked = _render(messages, tokenizer, add_generation_prompt=False, tools=tools)
    if whole:
        return Rendered(text=text, spans=[(0, len(text))])
    if tokenizer.chat_template and load_template(tokenizer.chat_template).marks_answers:
        return Rendered(text=text, spans=marked)
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    found = [_locate(messages, place, text, tokenizer, tools) for place in places]
    spans = [span for span in found if span is not None]
    if places and not spans:
        raise UserError(
            "The answers cannot be found in what the chat template makes of this conversation.",
            why="the template changes the answers or what stands around them.",
            do="pass --train_on_prompt, or mark the answers in the template with {% generation %}",
        )
    return Rendered(text=text, spans=spans, num_unlocated=len(places) - len(spans))


def encode_conversation(
    messages: Sequence[Message], tokenizer: Tokenizer, *, index: int, whole: bool
) -> Example:
    """Tokens of a conversation; supervised are the assistant's, up to and with the token that ends each answer."""
    rendered = render_conversation(messages, tokenizer, whole=whole)
    encoding = tokenizer.encode(rendered.text)
    return Example(
        tokens=np.asarray(encoding.ids, dtype=np.int32),
        supervised=mask_of(encoding, rendered),
        index=index,
    )


def encode_prompt(messages: Sequence[Message], tokenizer: Tokenizer, *, tools: Tools = None) -> list[int]:
    """Tokens that ask for an answer."""
    return list(tokenizer.encode(render(messages, tokenizer, add_generation_prompt=True, tools=tools)).ids)


def mask_of(encoding: Encoding, rendered: Rendered) -> NDArray[np.bool_]:
    """Which tokens have a character inside a span."""
    if list(rendered.spans) == [(0, len(rendered.text))]:
        return np.ones(len(encoding.ids), dtype=np.bool_)
    mask = np.zeros(len(encoding.ids), dtype=np.bool_)
    for start, end in rendered.spans:
        first = _token_at(encoding, range(start, end))
        last = _token_at(encoding, range(end - 1, start - 1, -1))
        if first is None or last is None:
            continue
        # One character can be several tokens, each a part of its bytes.
        while last + 1 < len(mask) and _starts_before(encoding, last + 1, end):
            last += 1
        mask[first : last + 1] = True
    return mask


def _token_at(encoding: Encoding, characters: range) -> int | None:
    """The token of the first of these characters that has one: tokenizers drop some white space."""
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
        familiar=not tokenizer.chat_template,
        add_generation_prompt=add_generation_prompt,
        bos_token=tokenizer.bos_token or "",
        eos_token=tokenizer.eos_token or "",
        leading_bos=tokenizer.leading_bos,
        # As transformers does: a template may ask whether there are any.
        tools=tools,
        documents=None,
    )


def _locate(
    messages: Sequence[Message], place: int, text: str, tokenizer: Tokenizer, tools: Tools
) -> Span | None:
    """Where an answer stands in the whole text: from the end of the prompt that asks for it, to its end token.

    Both ends are found by rendering the conversation up to there. Templates that treat earlier turns otherwise than
    the last (they strip the reasoning from them, say) are rendered a second time with another answer in its place:
    what stays the same on both sides of it is not the answer.
    """
    prompt = _render_part(messages[:place], tokenizer, add_generation_prompt=True, tools=tools)
    start, end = len(prompt) if prompt and text.startswith(prompt) else None, None
    through: str | None = text
    if place + 1 < len(messages):
        through = _render_part(messages[: place + 1], tokenizer, add_generation_prompt=False, tools=tools)
    if start is not None and through and text.startswith(through) and len(through) > start:
        end = _without_tail(through, start, tokenizer)
    if start is not None and end is not None and _heeds_prompt(tokenizer):
        return start, end
    around = _around(messages, place, text, tokenizer, tools)
    if around is None:
        return (start, end) if start is not None and end is not None else None
    before, behind = around
    if start is None or (text[start:before].strip() and not _heeds_prompt(tokenizer)):
        start = before
    return start, end if end is not None else _with_end_token(text, behind, tokenizer)


def _render_part(
    messages: Sequence[Message], tokenizer: Tokenizer, *, add_generation_prompt: bool, tools: Tools
) -> str | None:
    """A conversation cut short, which a template may refuse though it takes the whole."""
    try:
        return render(messages, tokenizer, add_generation_prompt=add_generation_prompt, tools=tools)
    except UserError:
        return None


def _around(
    messages: Sequence[Message], place: int, text: str, tokenizer: Tokenizer, tools: Tools
) -> Span | None:
    """Where the content of an answer begins and ends, by what a different content leaves unchanged."""
    stand_in = _stand_in(messages)
    changed = [*messages]
    # Calls of tools are part of an answer, so that they too must not stay the same.
    kept = {key: value for key, value in messages[place].items() if key != "tool_calls"}
    changed[place] = {**kept, "content": stand_in}
    other = _render_part(changed, tokenizer, add_generation_prompt=False, tools=tools)
    before, found, behind = other.partition(stand_in) if other else ("", "", "")
    if not found or stand_in in behind or len(before) + len(behind) > len(text):
        return None
    if not (text.startswith(before) and text.endswith(behind)):
        return None
    return len(before), len(text) - len(behind)


def _stand_in(messages: Sequence[Message]) -> str:
    for number in count():
        word = f"StandIn{number}Answer"
        if not any(word in message["content"] for message in messages):
            return word
    raise AssertionError("count() does not end")


def _without_tail(text: str, start: int, tokenizer: Tokenizer) -> int:
    """The end of an answer: white space that a template writes behind the end token belongs to nobody."""
    stripped = text.rstrip()
    if len(stripped) > start and stripped.endswith(_end_tokens(tokenizer)):
        return len(stripped)
    return len(text)


def _with_end_token(text: str, end: int, tokenizer: Tokenizer) -> int:
    """The end of an answer that is followed by other turns: behind its end token, where there is one."""
    skipped = end + len(text[end:]) - len(text[end:].lstrip())
    for token in _end_tokens(tokenizer):
        if text.startswith(token, skipped):
            return skipped + len(token)
    return end


@lru_cache(maxsize=8)
def _end_tokens(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Special tokens, the longest first, so that none hides behind its own beginning."""
    words = {*tokenizer.special, tokenizer.eos_token or ""} - {""}
    return tuple(sorted(words, key=len, reverse=True)) or ("\0",)


@lru_cache(maxsize=8)
def _heeds_prompt(tokenizer: Tokenizer) -> bool:
    """Whether the template writes anything to ask for an answer. One that does not may still name the speaker."""
    turn = [{"role": "user", "content": "Hello"}]
    texts = [render(turn, tokenizer, add_generation_prompt=asks) for asks in (False, True)]
    return texts[0] != texts[1]
