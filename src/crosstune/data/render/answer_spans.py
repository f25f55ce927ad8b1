"""Render conversations with chat templates in jinja's sandbox, and find the exact character spans of the answers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from crosstune.core.errors import UserError
from crosstune.data.read.pictures import as_parts
from crosstune.data.render.template_marks import Generation, Marks, extract_marks
from crosstune.data.render.types import (
    NO_LOSS,
    PLAIN_TEMPLATE,
    REASONING_KEYS,
    Message,
    Span,
    Tools,
)

if TYPE_CHECKING:
    from crosstune.data.tokens.tokenizer import Tokenizer

LONGEST_TEMPLATE = 256 << 10
"""Maximum characters of a template. Templates of published models have a few thousand; the longest has about 30,000."""
DAY = datetime(2025, 1, 1)
"""The date that templates see: the tokens of a run must not depend on the day it is started."""


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

    def render(
        self, messages: Sequence[Message], *, picture: tuple[str, str] = ("", ""), **variables: Any
    ) -> tuple[str, Marks]:
        """Return the text, with its marked spans and the spans of each message. The first text of `picture` is replaced by
        the second."""
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
        text = "".join(pieces)
        return extract_marks(text.replace(*picture) if picture[0] else text)


load_template = lru_cache(maxsize=16)(ChatTemplate)


def _with_reasoning(message: Message) -> dict[str, Any]:
    """Return a copy of the message with its reasoning under the names that templates read, as in transformers, and without
    our own key."""
    message = {key: value for key, value in message.items() if key != NO_LOSS}
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
    """Write JSON as transformers' `tojson` does: without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise Rejected(message)


# Where a generation prompt opens or skips the reasoning. Both carry loss, as in TRL.
OPENED_REASONING = re.compile(
    r"(<(?P<tag>[\w:]*(think|thought|reason)[\w:]*)>|\[(?P<name>\w*THINK\w*)\])\s*"
    r"(?P<closed>(</(?P=tag)>|\[/(?P=name)\])\s*)?$"
)

# Words in a conversation that turn its reasoning on or off, in templates such as that of SmolLM3.
_SWITCH = re.compile(r"/(?:no_?)?think\b")

_QUESTION: Message = {"role": "user", "content": "Hello"}


def render_text(
    messages: Sequence[Message], tokenizer: Tokenizer, *, add_generation_prompt: bool, tools: Tools
) -> tuple[str, Marks]:
    """Return the text of a conversation, with its marked spans and the spans of each message."""
    template = _template(tokenizer)
    try:
        return template.render(
            [as_parts(message) for message in messages] if tokenizer.reads_parts else messages,
            picture=tokenizer.picture,
            add_generation_prompt=add_generation_prompt,
            leading_bos=tokenizer.leading_bos,
            # Passed even when None, as in transformers: a template may test them.
            tools=tools,
            documents=None,
            **tokenizer.named_tokens,
        )
    except Exception as error:  # of jinja or of the code in the template
        raise _template_error(tokenizer, "render this conversation", error) from error


def locate_answers(
    messages: Sequence[Message], text: str, marks: Marks, tokenizer: Tokenizer, *, tools: Tools
) -> tuple[list[Span], int]:
    """Return the spans of the answers with their end tokens, and the number of answers that cannot be found."""
    if _template(tokenizer).marks_answers:
        return _with_loss(messages, marks), 0
    places = [place for place, message in enumerate(messages) if _is_answer(message)]
    found = [_locate(messages, place, text, marks, tokenizer, tools) for place in places]
    spans = [span for answer in found for span in answer]
    if places and not spans:
        raise UserError(
            "Cannot locate the assistant's answers in the rendered chat template.",
            why="the template changes the answers or the text around them.",
            do="pass --train_on_prompt, or mark the answers in the template with {% generation %}",
        )
    return spans, found.count([])


def find_prompt_ends(
    text: str, spans: Sequence[Span], tokenizer: Tokenizer, *, switches: tuple[str, ...] = ()
) -> list[int]:
    """Return the position at which the generation prompt of each answer ends: inside the span if the marks of the template
    include the header or if the prompt opens the reasoning, at its start if the template has no generation prompt."""
    ends = []
    for start, _ in spans:
        for header in _full_headers(tokenizer, switches):
            found = text.find(header, max(0, start - len(header)), start + len(header))
            if found >= 0:
                ends.append(found + len(header) if header else start)
                break
    return [end for end in ends if 0 < end < len(text)]


def find_switches(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the words of a conversation, such as /no_think, with which its template changes the generation prompt."""
    if not _SWITCH.search(tokenizer.chat_template or ""):
        return ()
    asked = (str(message["content"]) for message in messages if message["role"] != "assistant")
    return tuple(sorted({word for text in asked for word in _SWITCH.findall(text)}))


@lru_cache(maxsize=8)
def _full_header(tokenizer: Tokenizer) -> str:
    """Return the generation prompt after a question, with the reasoning that it opens."""
    return _prompt([_QUESTION], tokenizer, None, opened=True)


@lru_cache(maxsize=8)
def _full_headers(tokenizer: Tokenizer, switches: tuple[str, ...]) -> Sequence[str]:
    """Return the generation prompts after a question without a switch and with each, the longest first."""
    turns: list[list[Message]] = []
    for word in switches:
        turns += [[{"role": "system", "content": word}, _QUESTION], [{"role": "user", "content": word}]]
    others = {_prompt(asked, tokenizer, None, opened=True) for asked in turns} - {""}
    return sorted({_full_header(tokenizer), *others}, key=len, reverse=True)


def opens_reasoning(tokenizer: Tokenizer) -> bool:
    """Return True if the generation prompt opens the reasoning and leaves it open."""
    opened = OPENED_REASONING.search(_full_header(tokenizer))
    return opened is not None and not opened["closed"]


def effective_extras(
    messages: Sequence[Message], text: str, tokenizer: Tokenizer, extras: Sequence[str], *, tools: Tools
) -> frozenset[str]:
    """Return the extra keys, or `tools`, that change the rendered `text`."""
    found = set()
    for extra in extras:
        # Reasoning is passed under all of its names, so remove all of them.
        left_out = REASONING_KEYS if extra in REASONING_KEYS else (extra,)
        without = [{key: value for key, value in turn.items() if key not in left_out} for turn in messages]
        fewer = None if extra == "tools" else tools
        # Without the key, the template may reject the conversation, such as the result of a tool that was not called.
        if text != _render_part(without, tokenizer, add_generation_prompt=False, tools=fewer)[0]:
            found.add(extra)
    return frozenset(found)


def _is_answer(message: Message) -> bool:
    """Return True if a message is an answer to learn, not part of a prompt."""
    return message["role"] == "assistant" and not message.get(NO_LOSS)


def _with_loss(messages: Sequence[Message], marks: Marks) -> list[Span]:
    """Return the marked spans of the answers to learn, without answers inside a prompt. The spans are the texts of the
    messages; if the template writes answers elsewhere, it must mark one part for each answer."""
    answers = [message for message in messages if message["role"] == "assistant"]
    marked = list(marks.generated)
    if all(map(_is_answer, answers)):
        return marked
    turns = [(span, messages[place]) for place, spans in marks.turns.items() for span in spans]
    writers = [next((turn for (a, b), turn in turns if a <= start < b), None) for start, _ in marked]
    if all(turn is not None and turn["role"] == "assistant" for turn in writers):
        return [span for span, turn in zip(marked, writers, strict=True) if turn and _is_answer(turn)]
    if len(marked) != len(answers):
        raise UserError(
            "The answers that carry loss cannot be distinguished from the others.",
            why=f"the chat template marks {len(marked)} parts for {len(answers)} answers.",
        )
    return [span for span, message in zip(marked, answers, strict=True) if _is_answer(message)]


def _template(tokenizer: Tokenizer) -> ChatTemplate:
    try:
        return load_template(tokenizer.chat_template or PLAIN_TEMPLATE)
    except Exception as error:
        raise _template_error(tokenizer, "be read", error) from error


def _template_error(tokenizer: Tokenizer, verb: str, error: Exception) -> UserError:
    kind = "" if isinstance(error, Rejected) else f"{type(error).__name__}: "
    return UserError(
        f"The chat template {tokenizer.template_file or 'of this model'} cannot {verb}.",
        why=f"{kind}{' '.join(str(error).split())[:300]}",
        do="check the conversation, and repair the template, or train with a different one, such as --chat_template chatml",
    )


def _locate(
    messages: Sequence[Message], place: int, text: str, marks: Marks, tokenizer: Tokenizer, tools: Tools
) -> list[Span]:
    """Return the spans of an answer: the text of its message after the prompt's header, up to the end token. If the loops
    of the template cannot be marked, it is rendered again with a placeholder, and the text that changes is the answer."""
    if place not in marks.turns or not _writes_answers(tokenizer):
        around = _around(messages, place, text, tokenizer, tools)
        spans = [] if around is None else [(around[0], _with_end_token(text, around[1], tokenizer))]
    else:
        (first, end), *others = marks.turns[place]
        start = first + len(_header(messages, place, text[first:end], tokenizer, tools))
        spans = [(start, end), *others]
        is_last = place + 1 == len(messages)
        spans[-1] = (spans[-1][0], _end_of(text, spans[-1], tokenizer, is_last=is_last))
    return [span for span in spans if span[1] > span[0]]


def _header(messages: Sequence[Message], place: int, block: str, tokenizer: Tokenizer, tools: Tools) -> str:
    """Return the start of an answer's text that the generation prompt already contains."""
    usual = _usual_header(tokenizer)
    if usual is not None and block.startswith(usual):
        return usual
    prompt = _prompt(messages[:place], tokenizer, tools)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(block, prompt, strict=False))
    return block[: sum(1 for _ in same)]


@lru_cache(maxsize=8)
def _usual_header(tokenizer: Tokenizer) -> str | None:
    """Return the header of an answer to a single question, or None if the template rejects such a conversation."""
    prompt = _prompt([_QUESTION], tokenizer, None)
    if prompt:
        return prompt
    # Without a generation prompt, the template may still write the role.
    text, turn = _probe(tokenizer)
    if turn is None:
        return None
    header, found, _ = text[turn[0] : turn[1]].partition(_placeholder([]))
    # The model itself writes whitespace before the answer.
    return (header if header.strip() else "") if found else None


@lru_cache(maxsize=8)
def _writes_answers(tokenizer: Tokenizer) -> bool:
    """Return True if the template writes an answer inside the turn of its message, or has no marked loop."""
    text, turn = _probe(tokenizer)
    return turn is None or _placeholder([]) in text[turn[0] : turn[1]]


def _probe(tokenizer: Tokenizer) -> tuple[str, Span | None]:
    """Return the text of a question and an answer, and the span of the answer's turn."""
    turns: list[Message] = [_QUESTION, {"role": "assistant", "content": _placeholder([])}]
    text, marks = _render_part(turns, tokenizer, add_generation_prompt=False, tools=None)
    spans = marks.turns.get(1)
    return text, (spans[0][0], spans[-1][1]) if spans else None


def _prompt(messages: Sequence[Message], tokenizer: Tokenizer, tools: Tools, *, opened: bool = False) -> str:
    """Return the generation prompt after these messages, up to where it opens the reasoning unless `opened`."""
    asked, marks = _render_part(messages, tokenizer, add_generation_prompt=True, tools=tools)
    told, _ = _render_part(messages, tokenizer, add_generation_prompt=False, tools=tools)
    prompt = asked.removeprefix(told) if told and asked.startswith(told) else ""
    if not prompt and marks.turns:
        # The last message is written differently before a prompt, or its end is the prompt.
        prompt = asked[marks.end :]
    return prompt if opened else OPENED_REASONING.sub("", prompt)


def _render_part(
    messages: Sequence[Message], tokenizer: Tokenizer, *, add_generation_prompt: bool, tools: Tools
) -> tuple[str, Marks]:
    """Render part of a conversation; return an empty string if the template rejects it."""
    try:
        return render_text(messages, tokenizer, add_generation_prompt=add_generation_prompt, tools=tools)
    except UserError:
        return "", Marks()


def _around(
    messages: Sequence[Message], place: int, text: str, tokenizer: Tokenizer, tools: Tools
) -> Span | None:
    """Return the span of an answer's content: the text that changes when the content is replaced."""
    placeholder = _placeholder(messages)
    changed = [*messages]
    # Tool calls are part of an answer, so they are removed too.
    kept = {key: value for key, value in messages[place].items() if key != "tool_calls"}
    changed[place] = {**kept, "content": placeholder}
    other, _ = _render_part(changed, tokenizer, add_generation_prompt=False, tools=tools)
    before, found, behind = other.partition(placeholder) if other else ("", "", "")
    if not found or placeholder in behind or len(before) + len(behind) > len(text):
        return None
    if not (text.startswith(before) and text.endswith(behind)):
        return None
    return len(before), len(text) - len(behind)


def _placeholder(messages: Sequence[Message]) -> str:
    """Return a word that no message contains."""
    words = (f"StandIn{number}Answer" for number in count())
    return next(word for word in words if not any(word in message["content"] for message in messages))


def _end_of(text: str, span: Span, tokenizer: Tokenizer, *, is_last: bool) -> int:
    """Return the end of an answer, without whitespace after the end token. In some templates the model stops at the token
    that begins the next turn; some write one more end token after the last message."""
    start, end = span
    if is_last and text[end:].strip() in _end_tokens(tokenizer):
        return len(text.rstrip())
    stripped = text[start:end].rstrip()
    if stripped.endswith(_end_tokens(tokenizer)):
        return start + len(stripped)
    following = next((token for token in tokenizer.stop_tokens if text.startswith(token, end)), "")
    return end + len(following)


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
    tokens = {*tokenizer.special, tokenizer.named_tokens.get("eos_token", "")} - {""}
    return tuple(sorted(tokens, key=len, reverse=True)) or ("\0",)
