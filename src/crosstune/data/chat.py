"""Render conversations to text and find the exact character spans of the assistant's answers.

This runs in the process of `render_worker`; other modules call `rendering`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import count

from crosstune.core.errors import UserError
from crosstune.data.render_types import ChatTokens, Message, Rendered, Span, Tools, template_error
from crosstune.data.template import FAULTS, ChatTemplate, Refused, load_template
from crosstune.data.template_limits import OverLimit

# For models without a chat template: each turn on its own line, the end token after each answer.
PLAIN_TEMPLATE = (
    "{{ leading_bos }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}Assistant: {{ m.content }}{{ eos_token }}\n"
    "{% else %}{{ m.role | capitalize }}: {{ m.content }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def plain_template(*, leading_bos: bool) -> str:
    """Return the plain template for other tools, which do not define `leading_bos`."""
    return PLAIN_TEMPLATE.replace("{{ leading_bos }}", "{{ bos_token }}" if leading_bos else "")


def render(
    messages: Sequence[Message], tokenizer: ChatTokens, *, add_generation_prompt: bool, tools: Tools = None
) -> str:
    """Return the text of a conversation, in which the model may call `tools`."""
    return _render(messages, tokenizer, add_generation_prompt=add_generation_prompt, tools=tools)[0]


def render_conversation(
    messages: Sequence[Message], tokenizer: ChatTokens, *, whole: bool, tools: Tools = None
) -> Rendered:
    """Render a conversation with the spans of its answers and their end tokens, or with one span if `whole`."""
    text, marked = _render(messages, tokenizer, add_generation_prompt=False, tools=tools)
    if whole:
        return Rendered(text=text, spans=[(0, len(text))])
    if _template(tokenizer).marks_answers:
        return Rendered(text=text, spans=marked)
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    found = [_locate(messages, place, text, tokenizer, tools) for place in places]
    spans = [span for span in found if span is not None]
    if places and not spans:
        raise UserError(
            "The answers cannot be found in the text that the chat template renders.",
            why="the template changes the answers or the text around them.",
            do="pass --train_on_prompt, or mark the answers in the template with {% generation %}",
        )
    return Rendered(text=text, spans=spans, num_unlocated=len(places) - len(spans))


def effective_extras(
    messages: Sequence[Message], tokenizer: ChatTokens, extras: Sequence[str], *, tools: Tools
) -> frozenset[str]:
    """Return those of the extra keys (and `tools`) that change the text which the template renders."""
    text = render(messages, tokenizer, add_generation_prompt=False, tools=tools) if extras else ""
    found = set()
    for extra in extras:
        without = [{key: value for key, value in turn.items() if key != extra} for turn in messages]
        fewer = None if extra == "tools" else tools
        # It may refuse them without the key, such as the answer of a tool that was not called.
        if text != _render_part(without, tokenizer, add_generation_prompt=False, tools=fewer):
            found.add(extra)
    return frozenset(found)


def _render(
    messages: Sequence[Message], tokenizer: ChatTokens, *, add_generation_prompt: bool, tools: Tools
) -> tuple[str, list[Span]]:
    template = _template(tokenizer)
    try:
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            bos_token=tokenizer.bos_token or "",
            eos_token=tokenizer.eos_token or "",
            leading_bos=tokenizer.leading_bos,
            # Passed even when None, as in transformers: a template may test them.
            tools=tools,
            documents=None,
        )
    except (*FAULTS, Refused, OverLimit) as error:
        raise template_error(
            tokenizer.template_file, "render this conversation", why=_reason(error)
        ) from error


def _template(tokenizer: ChatTokens) -> ChatTemplate:
    try:
        return load_template(tokenizer.chat_template or PLAIN_TEMPLATE)
    except (*FAULTS, OverLimit) as error:
        raise template_error(tokenizer.template_file, "be read", why=_reason(error)) from error


def _reason(error: Exception) -> str:
    kind = "" if isinstance(error, (Refused, OverLimit)) else f"{type(error).__name__}: "
    return f"{kind}{' '.join(str(error).split())[:300]}"


def _locate(
    messages: Sequence[Message], place: int, text: str, tokenizer: ChatTokens, tools: Tools
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
    messages: Sequence[Message], tokenizer: ChatTokens, *, add_generation_prompt: bool, tools: Tools
) -> str | None:
    """Render a part of a conversation; return None when the template refuses it, as it may take whole ones only."""
    try:
        return render(messages, tokenizer, add_generation_prompt=add_generation_prompt, tools=tools)
    except UserError:
        return None


def _around(
    messages: Sequence[Message], place: int, text: str, tokenizer: ChatTokens, tools: Tools
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


def _without_tail(text: str, start: int, tokenizer: ChatTokens) -> int:
    """Return the end of an answer, without white space that the template writes after the end token."""
    stripped = text.rstrip()
    if len(stripped) > start and stripped.endswith(_end_tokens(tokenizer)):
        return len(stripped)
    return len(text)


def _with_end_token(text: str, end: int, tokenizer: ChatTokens) -> int:
    """Return the end of an answer that other turns follow: after its end token, if there is one."""
    skipped = end + len(text[end:]) - len(text[end:].lstrip())
    for token in _end_tokens(tokenizer):
        if text.startswith(token, skipped):
            return skipped + len(token)
    return end


@lru_cache(maxsize=8)
def _end_tokens(tokenizer: ChatTokens) -> tuple[str, ...]:
    """Return the special tokens, longest first, so that none is matched by its own prefix."""
    tokens = {*tokenizer.special, tokenizer.eos_token or ""} - {""}
    return tuple(sorted(tokens, key=len, reverse=True)) or ("\0",)


@lru_cache(maxsize=8)
def _writes_prompt(tokenizer: ChatTokens) -> bool:
    """Return whether the template writes a generation prompt. Without one it may still name the speaker."""
    turn = [{"role": "user", "content": "Hello"}]
    texts = [render(turn, tokenizer, add_generation_prompt=asks) for asks in (False, True)]
    return texts[0] != texts[1]
