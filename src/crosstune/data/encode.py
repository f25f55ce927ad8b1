"""Tokenize the rows of a source into a store, in one pass and in batches of texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from crosstune.core.errors import UserError
from crosstune.data.chat import Rendered, mask_of, render, render_conversation
from crosstune.data.formats import (
    TOOLS_COLUMN,
    Row,
    has_empty_answer,
    recognise,
    to_conversation,
    tools_of,
    turn_keys,
    unused_columns,
)
from crosstune.data.sources import Source
from crosstune.data.store import StoreWriter
from crosstune.data.tokenizer import Tokenizer

OnProgress = Callable[[int, int, int], None]
"""Receives the bytes read, the total bytes, and the number of examples so far."""

# Large enough to keep all cores busy, small enough that the token offsets take a few dozen megabytes.
BATCH_CHARACTERS = 256 << 10
BATCH_TEXTS = 512
_SECONDS_BETWEEN_REPORTS = 0.2
_ROWS_TO_TRY = 50
_MOST_COLUMNS_NAMED = 20


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """How rows are turned into text and tokens."""

    tokenizer: Tokenizer
    form: str
    whole: bool

    def to_text(self, row: Row) -> Rendered | None:
        """Return the text and the spans with loss; None for a row with an empty answer."""
        conversation = to_conversation(row, self.form)
        if has_empty_answer(conversation):
            return None
        if isinstance(conversation, str):
            text = f"{self.tokenizer.leading_bos}{conversation}{self.tokenizer.eos_token or ''}"
            rendered = Rendered(text=text, spans=[(0, len(text))])
        else:
            rendered = render_conversation(
                conversation, self.tokenizer, whole=self.whole, tools=tools_of(row)
            )
        _check_characters(rendered.text)
        return rendered

    def extras(self, row: Row) -> set[str]:
        """Return the keys of a conversation besides role and content."""
        conversation = to_conversation(row, self.form)
        if isinstance(conversation, str):
            return set()
        return turn_keys(conversation) | ({TOOLS_COLUMN} if tools_of(row) else set())

    def is_rendered(self, row: Row, extra: str) -> bool:
        """Return whether an extra key changes the text that the chat template renders."""
        conversation, tools = to_conversation(row, self.form), tools_of(row)
        assert not isinstance(conversation, str)
        without = [{key: value for key, value in turn.items() if key != extra} for turn in conversation]
        text = render(conversation, self.tokenizer, add_generation_prompt=False, tools=tools)
        if extra == TOOLS_COLUMN:
            tools = None
        try:
            return text != render(without, self.tokenizer, add_generation_prompt=False, tools=tools)
        except UserError:  # such as the answer of a tool that was not called
            return True


@dataclass
class _Pass:
    """One pass over a source. While a batch is tokenized, the texts of the next are rendered."""

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
    ignored: dict[str, int] = field(default_factory=dict)
    """Extra keys that had no effect so far -> the number of rows tried."""
    rendered_extras: set[str] = field(default_factory=set)

    def take(self, row: Row) -> None:
        rendered = self.encoder.to_text(row)
        self._note_unused(row)
        index = self.num_rows
        self.num_rows += 1
        if rendered is None:
            self.num_empty += 1
            return
        self.num_unlocated += rendered.num_unlocated
        self.texts.append((index, rendered))
        self.characters += len(rendered.text)
        if self.characters >= BATCH_CHARACTERS or len(self.texts) >= BATCH_TEXTS:
            self.flush()

    def _note_unused(self, row: Row) -> None:
        """Note the columns and keys of the row that are not in the text."""
        if len(self.unused) < _MOST_COLUMNS_NAMED:
            self.unused |= unused_columns(row, self.encoder.form)
        for extra in self.encoder.extras(row) - self.rendered_extras:
            if self.ignored.get(extra, 0) >= _ROWS_TO_TRY:
                continue
            if self.encoder.is_rendered(row, extra):
                self.rendered_extras.add(extra)
                self.ignored.pop(extra, None)
            else:
                self.ignored[extra] = self.ignored.get(extra, 0) + 1

    def flush(self) -> None:
        """Submit the texts for tokenization, and write the batch submitted before."""
        self.finish()
        texts = [rendered.text for _, rendered in self.texts]
        self.pending = (self.texts, self.thread.submit(self.encoder.tokenizer.encode_batch, texts))
        self.texts, self.characters = [], 0

    def finish(self) -> None:
        if self.pending is None:
            return
        batch, encoded = self.pending
        for (row, rendered), encoding in zip(batch, encoded.result(), strict=True):
            tokens = np.asarray(encoding.ids, dtype=np.int32)
            self.encoder.tokenizer.check_largest(int(tokens.max(initial=0)))
            self.writer.append(tokens, mask_of(encoding, rendered), row=row)
        self.pending = None

    def facts(self) -> dict[str, Any]:
        return {
            "rows": self.num_rows,
            "empty": self.num_empty,
            "unlocated_answers": self.num_unlocated,
            "unused_columns": sorted(self.unused),
            "ignored_by_template": sorted(self.ignored),
        }


def encode_source(
    source: Source, encoder: Encoder, writer: StoreWriter, *, limit: int, progress: OnProgress | None
) -> dict[str, Any]:
    """Tokenize and write all rows, or the first `limit` unless that is -1; return the counts."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        run = _Pass(writer=writer, encoder=encoder, thread=thread)
        _read(source, run, limit=limit, progress=progress)
        run.flush()
        run.finish()
    if progress is not None:
        progress(source.size_bytes, source.size_bytes, writer.num_examples)
    check_any_answer(source.name, run.encoder.form, num_rows=run.num_rows, num_empty=run.num_empty)
    return run.facts()


def _read(source: Source, run: _Pass, *, limit: int, progress: OnProgress | None) -> None:
    total = source.size_bytes
    reported = time.monotonic()
    for part, found, done in source.rows():
        if run.num_rows == limit:
            return
        try:
            run.take(found.row)
        except UserError as error:
            raise UserError(
                f"{part.place(found.number)}: {error.asked}", why=error.why, do=error.do
            ) from error
        if progress is not None and time.monotonic() - reported >= _SECONDS_BETWEEN_REPORTS:
            reported = time.monotonic()
            progress(done, total, run.writer.num_examples)


def source_format(source: Source, *, asked: str) -> str:
    """Return the format of a source: as requested, as its name implies, or by the columns of its first row."""
    first = first_row(source)
    if asked == "auto" and source.form != "auto":
        asked = source.form
    return recognise(first, asked=asked, source=source.name)


def first_row(source: Source) -> Row:
    rows: Iterator[Any] = source.rows()
    for _, found, _ in rows:
        return found.row
    raise UserError(f"The dataset {source.name} is empty.", do="give it at least one row")


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
