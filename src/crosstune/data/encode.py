"""Tokenize the rows of a source into a store, in one pass and in batches of texts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.data.formats import (
    TOOLS_COLUMN,
    WITHOUT_TURNS,
    Conversation,
    Row,
    has_empty_answer,
    to_conversation,
    tools_of,
    turn_keys,
    unused_columns,
)
from crosstune.data.render_ahead import BATCH_CHARACTERS, BATCH_TEXTS, Request, render_ahead
from crosstune.data.render_types import Rendered, RenderRow
from crosstune.data.rendering import mask_of, shared_renderer
from crosstune.data.sources import Part, Source
from crosstune.data.store import StoreWriter
from crosstune.data.tokenizer import Tokenizer

OnProgress = Callable[[int, int, int], None]
"""Receives the bytes read, the total bytes, and the number of examples so far."""

_SECONDS_BETWEEN_REPORTS = 0.2
_ROWS_TO_TRY = 50
_MOST_COLUMNS_NAMED = 20


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Turn rows into text and tokens."""

    tokenizer: Tokenizer
    form: str
    whole: bool

    def to_request(self, conversation: Conversation, row: Row, *, extras: Sequence[str] = ()) -> Request:
        """Return the text of a row, or what to render. Rendering reports which of the `extras` change the text."""
        if isinstance(conversation, str):
            return Rendered(text=conversation, spans=[(0, len(conversation))])
        kind = "whole" if self.whole else "answers"
        return RenderRow.of(conversation, kind=kind, tools=tools_of(row), extras=extras)

    def to_tokens(self, texts: Sequence[Rendered]) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
        """Return the tokens of each text, and which of them carry loss."""
        if self.form in WITHOUT_TURNS:
            plain = self.tokenizer.encode_plain_batch([rendered.text for rendered in texts])
            return [(np.asarray(ids, dtype=np.int32), np.ones(len(ids), dtype=np.bool_)) for ids in plain]
        encodings = self.tokenizer.encode_batch([rendered.text for rendered in texts])
        return [
            (np.asarray(encoding.ids, dtype=np.int32), mask_of(encoding, rendered))
            for encoding, rendered in zip(encodings, texts, strict=True)
        ]


@dataclass(frozen=True)
class RowPlace:
    """The source of a row."""

    part: Part
    number: int
    index: int
    done_bytes: int

    def error(self, error: UserError) -> UserError:
        return UserError(f"{self.part.place(self.number)}: {error.asked}", why=error.why, do=error.do)


@dataclass
class _Pass:
    """One pass over a source. While a batch is tokenized, the next one is rendered, and the rows after it are read."""

    writer: StoreWriter
    encoder: Encoder
    thread: ThreadPoolExecutor
    texts: list[tuple[int, Rendered]] = field(default_factory=list)
    pending: tuple[list[tuple[int, Rendered]], Future[Any]] | None = None
    characters: int = 0
    num_rows: int = 0
    num_empty: int = 0
    num_unlocated: int = 0
    unused: set[str] = field(default_factory=set)
    num_tried: Counter[str] = field(default_factory=Counter)
    """Extra key -> the number of rows in which it was tried whether the template renders it."""
    rendered_extras: set[str] = field(default_factory=set)

    def requests(self, source: Source, *, limit: int) -> Iterator[tuple[RowPlace, Request]]:
        """Read the rows, or the first `limit` unless that is -1."""
        for part, found, done in source.rows():
            if self.num_rows == limit:
                return
            place = RowPlace(part, found.number, self.num_rows, done)
            self.num_rows += 1
            try:
                request = self._request(found.row)
            except UserError as error:
                raise place.error(error) from error
            if request is not None:
                yield place, request

    def _request(self, row: Row) -> Request | None:
        """Return what to render; None for a row with an empty answer."""
        conversation = to_conversation(row, self.encoder.form)
        if len(self.unused) < _MOST_COLUMNS_NAMED:
            self.unused |= unused_columns(row, self.encoder.form)
        if has_empty_answer(conversation):
            self.num_empty += 1
            return None
        extras = self._extras_to_try(row, conversation)
        return self.encoder.to_request(conversation, row, extras=extras)

    def take(self, place: RowPlace, rendered: Rendered) -> None:
        _check_characters(rendered.text)
        self.rendered_extras |= rendered.effective_extras
        self.num_unlocated += rendered.num_unlocated
        self.texts.append((place.index, rendered))
        self.characters += len(rendered.text)
        if self.characters >= BATCH_CHARACTERS or len(self.texts) >= BATCH_TEXTS:
            self.flush()

    def _extras_to_try(self, row: Row, conversation: Conversation) -> list[str]:
        """Return the keys of a conversation besides role and content, unless they are known to be rendered or not."""
        if isinstance(conversation, str):
            return []
        extras = turn_keys(conversation) | ({TOOLS_COLUMN} if tools_of(row) else set())
        wanted = [extra for extra in extras - self.rendered_extras if self.num_tried[extra] < _ROWS_TO_TRY]
        self.num_tried.update(wanted)
        return sorted(wanted)

    def flush(self) -> None:
        """Submit the texts for tokenization, and write the batch submitted before."""
        self.finish()
        texts = [rendered for _, rendered in self.texts]
        self.pending = (self.texts, self.thread.submit(self.encoder.to_tokens, texts))
        self.texts, self.characters = [], 0

    def finish(self) -> None:
        if self.pending is None:
            return
        batch, encoded = self.pending
        for (row, _), (tokens, mask) in zip(batch, encoded.result(), strict=True):
            self.encoder.tokenizer.check_largest(int(tokens.max(initial=0)))
            self.writer.append(tokens, mask, row=row)
        self.pending = None

    def facts(self) -> dict[str, Any]:
        return {
            "rows": self.num_rows,
            "empty": self.num_empty,
            "unlocated_answers": self.num_unlocated,
            "unused_columns": sorted(self.unused),
            "ignored_by_template": sorted(self.num_tried.keys() - self.rendered_extras),
        }


def encode_source(
    source: Source, encoder: Encoder, writer: StoreWriter, *, limit: int, progress: OnProgress | None
) -> dict[str, Any]:
    """Tokenize and write all rows, or the first `limit` unless that is -1; return the counts."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        run = _Pass(writer=writer, encoder=encoder, thread=thread)
        _run(source, run, limit=limit, progress=progress)
        run.flush()
        run.finish()
    if progress is not None:
        progress(source.size_bytes, source.size_bytes, writer.num_examples)
    check_any_answer(source.name, run.encoder.form, num_rows=run.num_rows, num_empty=run.num_empty)
    return run.facts()


def _run(source: Source, run: _Pass, *, limit: int, progress: OnProgress | None) -> None:
    total = source.size_bytes
    reported = time.monotonic()
    requests = run.requests(source, limit=limit)
    tokens = run.encoder.tokenizer.chat_tokens
    with closing(render_ahead(requests, tokens, renderer=shared_renderer())) as rows:
        for place, rendered in rows:
            if isinstance(rendered, UserError):
                raise place.error(rendered)
            try:
                run.take(place, rendered)
            except UserError as error:
                raise place.error(error) from error
            if progress is not None and time.monotonic() - reported >= _SECONDS_BETWEEN_REPORTS:
                reported = time.monotonic()
                progress(place.done_bytes, total, run.writer.num_examples)


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            "It has half of a character, which is not valid text.",
            why=f"{text[error.start]!a} is a surrogate without its other half.",
            do="write the row again from its source, or remove the character",
        ) from error


def check_any_answer(source: str, form: str, *, num_rows: int, num_empty: int) -> None:
    """Raise a UserError when every row has an empty answer."""
    if num_rows and num_empty == num_rows:
        raise UserError(
            f"All {num_rows} rows of {source} have an empty answer.",
            why=f"read as {form}, there is nothing to learn from.",
            do="check the columns, or choose another --dataset_format",
        )
