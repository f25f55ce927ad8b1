"""Render conversations in a separate process with limits, and tokenize them."""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.data.render_process import Ended, RenderProcess
from crosstune.data.render_types import ChatTokens, Message, Rendered, RenderRow, Tools, template_error
from crosstune.data.template_limits import Limits
from crosstune.data.token_batch import Example
from crosstune.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding


class Renderer:
    """Render with one process, which is started when needed and kept for the next request."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._process: RenderProcess | None = None
        self._known_tokens: ChatTokens | None = None
        self._lock = threading.Lock()

    def render_rows(
        self, rows: Sequence[RenderRow], tokens: ChatTokens, *, stop: threading.Event | None = None
    ) -> list[Rendered | UserError]:
        """Return the text of each row, up to the first that cannot be rendered, which gives an error. `stop` ends the
        rendering from another thread."""
        stop = stop or threading.Event()
        results: list[Rendered | UserError] = []
        with self._lock:
            while len(results) < len(rows):
                results += self._render_some(rows[len(results) :], tokens, stop)
                if isinstance(results[-1], UserError):
                    break
        return results

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _render_some(
        self, rows: Sequence[RenderRow], tokens: ChatTokens, stop: threading.Event
    ) -> list[Rendered | UserError]:
        """Return the results of one reply, or of each row by itself when the process fails for all of them."""
        try:
            return self._exchange(rows, tokens, stop)
        except Ended as error:
            if len(rows) > 1:
                return self._render_singly(rows, tokens, stop)
            if error.over_limit:
                return [_over_limit(tokens, error)]
        try:  # something else ended the process, such as the system for lack of memory
            return self._exchange(rows, tokens, stop)
        except Ended as error:
            return [_over_limit(tokens, error)]

    def _render_singly(
        self, rows: Sequence[RenderRow], tokens: ChatTokens, stop: threading.Event
    ) -> list[Rendered | UserError]:
        results: list[Rendered | UserError] = []
        for row in rows:
            results += self._render_some([row], tokens, stop)
            if isinstance(results[-1], UserError):
                break
        return results

    def _exchange(
        self, rows: Sequence[RenderRow], tokens: ChatTokens, stop: threading.Event
    ) -> list[Rendered | UserError]:
        if self._process is None:
            self._process, self._known_tokens = RenderProcess(self._limits), None
        limits = [
            self._limits.row_cpu_s(characters=len(row.body), num_messages=row.num_messages) for row in rows
        ]
        known = tokens is self._known_tokens
        head = "" if known else f'"tokens": {json.dumps(asdict(tokens))}, '
        body = f'{{{head}"cpu_s": {json.dumps(limits)}, "rows": [{",".join(row.body for row in rows)}]}}'
        reply: bytes | None = None
        try:
            reply = self._process.exchange(body.encode(errors="surrogatepass"), cpu_s=sum(limits), stop=stop)
        finally:
            if reply is None:  # whatever happened, the process is not to be used any more
                self.close()
        self._known_tokens = tokens
        return [_result(fields) for fields in json.loads(reply)]


@lru_cache(maxsize=1)
def shared_renderer() -> Renderer:
    """Return the renderer of this process."""
    made = Renderer()
    atexit.register(made.close)
    os.register_at_fork(after_in_child=shared_renderer.cache_clear)
    return made


def render(
    messages: Sequence[Message], tokenizer: Tokenizer, *, add_generation_prompt: bool, tools: Tools = None
) -> str:
    """Return the text of a conversation, in which the model may call `tools`."""
    kind = "prompt" if add_generation_prompt else "text"
    return _render_one(RenderRow.of(messages, kind=kind, tools=tools), tokenizer).text


def render_conversation(
    messages: Sequence[Message], tokenizer: Tokenizer, *, whole: bool, tools: Tools = None
) -> Rendered:
    """Render a conversation with the spans of its answers and their end tokens, or with one span if `whole`."""
    return _render_one(RenderRow.of(messages, kind="whole" if whole else "answers", tools=tools), tokenizer)


def _render_one(row: RenderRow, tokenizer: Tokenizer) -> Rendered:
    [result] = shared_renderer().render_rows([row], tokenizer.chat_tokens)
    if isinstance(result, UserError):
        raise result
    return result


def _result(fields: Any) -> Rendered | UserError:
    if isinstance(fields, dict):
        return UserError(fields["asked"], why=fields["why"], do=fields["do"])
    text, spans, num_unlocated, extras = fields
    if any(0xD800 <= ord(char) < 0xE000 for char in text) if not text.isascii() else False:
        return UserError(
            "The chat template writes half of a character.",
            why="a surrogate without its other half is no text that a tokenizer takes.",
            do="correct the template, or pass another with --chat_template",
        )
    return Rendered(
        text=text,
        spans=[(start, end) for start, end in spans],
        num_unlocated=num_unlocated,
        effective_extras=frozenset(extras),
    )


def _over_limit(tokens: ChatTokens, error: Ended) -> UserError:
    return template_error(tokens.template_file, "render this conversation", why=error.why)


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
