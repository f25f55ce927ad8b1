"""Read, render and tokenize the rows of a source in one pass, into memory or into a cached store on disk."""

from __future__ import annotations

import errno
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.config.load import cache_base
from crosstune.core.errors import UserError
from crosstune.data.read.files import RawRow
from crosstune.data.read.formats import (
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
from crosstune.data.read.pictures import Picture, open_pictures
from crosstune.data.read.sources import Part, Source, folder_of, row_error, skipped_row
from crosstune.data.render.encoding import Encoded, check_texts, encode_rendered, expand_pictures
from crosstune.data.render.rendering import check_characters, prompts_change_tokens, render_conversation
from crosstune.data.render.types import REASONING_KEYS, Rendered
from crosstune.data.tokens.store import (
    MemoryWriter,
    StoreWriter,
    TokenStore,
    open_store,
    store_sizes,
    write_store,
)
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.files.atomic_files import clear_leftovers, put_in_place, staging_folder
from crosstune.files.json_files import read_object, write_json
from crosstune.files.plain_files import NO_ROOM, UnreadableFile, disk_full_reason, room_advice

OnProgress = Callable[[int, int, int], None]
"""Receives the bytes read, the total bytes, and the number of examples so far."""

LAYOUT = 6
"""Increase when rows are tokenized differently, so that cached stores are rebuilt."""
IN_MEMORY_BYTES = 64 << 20
"""Larger sources are tokenized to disk."""
MARKER = "store.json"

# Large enough to keep all cores busy, small enough that the token offsets need only a few dozen megabytes.
_BATCH_CHARACTERS = 256 << 10
_BATCH_TEXTS = 512
_SECONDS_BETWEEN_REPORTS = 0.2
_ROWS_TO_TRY = 50
_MAX_COLUMNS_NAMED = 20
_MAX_TOKENS_NAMED = 3
_MAX_BAD_ROWS = 10_000


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Turn rows into text and tokens."""

    tokenizer: Tokenizer
    form: str
    whole: bool

    def read(
        self, row: Row, folder: Path | None, *, decode: bool = True
    ) -> tuple[Conversation, Sequence[Picture]]:
        """Return the conversation of a row and its checked pictures, whose paths are relative to `folder`."""
        conversation = to_conversation(row, self.form, no_pictures=self.tokenizer.why_no_pictures)
        vision = self.tokenizer.vision
        if vision is None:
            return conversation, ()
        if isinstance(conversation, str):
            check_texts([conversation], vision)
            return conversation, ()
        check_texts([turn["content"] for turn in conversation], vision)
        return conversation, open_pictures(conversation, folder, decode=decode)

    def render(self, conversation: Conversation, row: Row, *, extras: Sequence[str] = ()) -> Rendered:
        """Return the text of a row, its supervised spans, and the `extras` that change the text."""
        if isinstance(conversation, str):
            check_characters(conversation)
            return Rendered(text=conversation, spans=[(0, len(conversation))])
        return render_conversation(
            conversation, self.tokenizer, whole=self.whole, tools=tools_of(row), extras=extras
        )

    def has_empty_answer(self, conversation: Conversation, row: Row) -> bool:
        """Return True if a row has nothing to learn in an answer."""

        def shows_reasoning(place: int) -> bool:
            assert not isinstance(conversation, str)
            alone = [
                turn
                if at == place
                else {key: value for key, value in turn.items() if key not in REASONING_KEYS}
                for at, turn in enumerate(conversation)
            ]
            return bool(self.render(alone, row, extras=REASONING_KEYS[:1]).effective_extras)

        return has_empty_answer(
            conversation, shows_reasoning=shows_reasoning, rules=self.tokenizer.data_rules
        )

    @cached_property
    def _compares_prompts(self) -> bool:
        return prompts_change_tokens(self.tokenizer)

    def to_tokens(self, texts: Sequence[Rendered]) -> list[Encoded]:
        """Return the tokens of each text and their loss mask."""
        if self.form in WITHOUT_TURNS:
            plain = self.tokenizer.encode_plain_batch([rendered.text for rendered in texts])
            return [
                Encoded(np.asarray(ids, dtype=np.int32), np.ones(len(ids), dtype=np.bool_)) for ids in plain
            ]
        encodings = self.tokenizer.encode_batch([rendered.text for rendered in texts])
        found = [
            expand_pictures(
                encode_rendered(rendered, encoding, self.tokenizer, compare_all=self._compares_prompts),
                rendered.pictures,
                self.tokenizer,
            )
            for encoding, rendered in zip(encodings, texts, strict=True)
        ]
        if not self.whole or self.tokenizer.data_rules < 4:
            return found
        prompts = self.tokenizer.encode_batch([rendered.text[: rendered.first_answer] for rendered in texts])
        return [
            encoded._replace(prompt=np.asarray(prompt.ids, dtype=np.int32) if prompt.ids else None)
            for encoded, prompt in zip(found, prompts, strict=True)
        ]


@dataclass(kw_only=True)
class _Pass:
    """One pass over a source. While a batch is tokenized, the next batch's rows are read and rendered."""

    writer: StoreWriter
    encoder: Encoder
    thread: ThreadPoolExecutor
    texts: list[tuple[int, Rendered]] = field(default_factory=list)
    pending: tuple[list[tuple[int, Rendered]], Future[Any]] | None = None
    characters: int = 0
    num_rows: int = 0
    num_empty: int = 0
    num_unlocated: int = 0
    num_without_reasoning: int = 0
    unused: set[str] = field(default_factory=set)
    num_tried: Counter[str] = field(default_factory=Counter)
    """The number of rows tested for each extra key."""
    rendered_extras: set[str] = field(default_factory=set)
    num_bad: int = 0
    bad: list[str] = field(default_factory=list)
    """Rows that cannot be read, as JSON text: file, line and reason."""
    advice: str = ""
    """Advice for the first bad row."""
    joined: set[str] = field(default_factory=set)
    """Tokens with the end of a prompt and the beginning of an answer."""

    def try_row(self, part: Part, found: RawRow) -> UserError | None:
        """Add a row, or return why it cannot be read."""
        if found.error is not None:
            self.num_rows += 1
            return found.error
        try:
            self.add(found.row, folder_of(part))
        except UserError as error:
            return row_error(error, part, found.number)
        return None

    def add(self, row: Row, folder: Path | None) -> None:
        """Render a row, unless its answer is empty, and submit the batch once it is full."""
        index = self.num_rows
        self.num_rows += 1
        conversation, pictures = self.encoder.read(row, folder)
        if len(self.unused) < _MAX_COLUMNS_NAMED:
            self.unused |= unused_columns(row, self.encoder.form)
        if self.encoder.has_empty_answer(conversation, row):
            self.num_empty += 1
            return
        extras = self._extras_to_try(row, conversation)
        rendered = replace(self.encoder.render(conversation, row, extras=extras), pictures=pictures)
        self.rendered_extras |= rendered.effective_extras
        self.num_unlocated += rendered.num_unlocated
        self.num_without_reasoning += rendered.lacks_reasoning
        self.texts.append((index, rendered))
        self.characters += len(rendered.text)
        if self.characters >= _BATCH_CHARACTERS or len(self.texts) >= _BATCH_TEXTS:
            self.flush()

    def skip(self, part: Part, number: int, error: UserError) -> None:
        """Count a row that cannot be read."""
        self.num_bad += 1
        self.advice = self.advice or error.do
        if len(self.bad) < _MAX_BAD_ROWS:
            self.bad.append(skipped_row(error, part, number))

    def _extras_to_try(self, row: Row, conversation: Conversation) -> list[str]:
        """Return the extra keys of a row for which it is unknown whether the template renders them."""
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
        """Write the submitted batch."""
        if self.pending is None:
            return
        batch, encoded = self.pending
        for (row, _), found in zip(batch, encoded.result(), strict=True):
            self.encoder.tokenizer.check_largest(int(found.tokens.max(initial=0)))
            self.writer.append(
                found.tokens,
                found.supervised,
                row=row,
                pictures=found.pictures,
                picture_end=found.picture_end,
                prompt=found.prompt,
            )
            if found.joined and len(self.joined) < _MAX_TOKENS_NAMED:
                self.joined.add(found.joined)
        self.pending = None

    def facts(self) -> dict[str, Any]:
        return {
            "rows": self.num_rows,
            "empty": self.num_empty,
            "unlocated_answers": self.num_unlocated,
            "without_reasoning": self.num_without_reasoning,
            "unused_columns": sorted(self.unused),
            "ignored_by_template": sorted(self.num_tried.keys() - self.rendered_extras),
            "bad_rows": self.num_bad,
            "skipped_rows": self.bad,
            "joined_tokens": sorted(map(repr, self.joined)),
        }


def encode_source(
    source: Source, encoder: Encoder, writer: StoreWriter, *, limit: int, progress: OnProgress | None
) -> dict[str, Any]:
    """Tokenize and write all rows, or the first `limit` unless that is -1; return the counts."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        run = _Pass(writer=writer, encoder=encoder, thread=thread)
        reported = time.monotonic()
        for part, found, done_bytes in source.rows():
            if run.num_rows == limit:
                break
            if (error := run.try_row(part, found)) is not None:
                if not source.skips_bad:
                    raise error
                run.skip(part, found.number, error)
            if progress is not None and time.monotonic() - reported >= _SECONDS_BETWEEN_REPORTS:
                reported = time.monotonic()
                progress(done_bytes, source.size_bytes, writer.num_examples)
        run.flush()
        run.finish()
    if progress is not None:
        progress(source.size_bytes, source.size_bytes, writer.num_examples)
    check_any_answer(
        source.name,
        run.encoder.form,
        num_rows=run.num_rows - run.num_bad,
        num_empty=run.num_empty,
        bad=run.bad,
        advice=run.advice,
    )
    return run.facts()


def check_any_answer(
    source: str, form: str, *, num_rows: int, num_empty: int, bad: Sequence[str] = (), advice: str = ""
) -> None:
    """Raise a UserError when no row can be read, or every row has an empty answer."""
    if bad and not num_rows:
        raise UserError(
            f"No row of {source} can be read.",
            why=f"the first: {json.loads(bad[0])['reason']}",
            do=advice or "check the columns, or choose a different --dataset_format",
        )
    if num_rows and num_empty == num_rows:
        raise UserError(
            f"All {num_rows} rows of {source} have an empty answer.",
            why=f"read as {form}, there is nothing to learn from.",
            do="check the columns, or choose a different --dataset_format",
        )


def tokenize_source(
    source: Source,
    encoder: Encoder,
    *,
    limit: int,
    in_memory_bytes: int,
    progress: OnProgress | None,
) -> tuple[TokenStore, dict[str, Any]]:
    """Tokenize a source of one format, or open its cached tokens; return them with everything that determines them."""
    tokenizer = encoder.tokenizer
    decides = {
        "layout": LAYOUT,
        "source": source.digest(),
        "tokenizer": tokenizer.digest,
        "template": tokenizer.chat_template,
        "specials": [tokenizer.leading_bos, tokenizer.bos_token, tokenizer.eos_token],
        "format": source.form,
        "whole": encoder.whole,
        "rules": tokenizer.data_rules,
        "rows": limit,
    }
    if tokenizer.vision is not None:
        decides["vision"] = repr(tokenizer.vision)
    if source.size_bytes <= in_memory_bytes:
        memory = MemoryWriter()
        store = memory.to_store(encode_source(source, encoder, memory, limit=limit, progress=progress))
    else:
        key = digest(decides | {"skips_bad": source.skips_bad})
        store = _cached_store(source, encoder, key=key, limit=limit, progress=progress)
    return store, decides


def cache_folder() -> Path:
    """Return the folder for tokens of large datasets and rows from memory."""
    return cache_base() / "data"


def _cached_store(
    source: Source, encoder: Encoder, *, key: str, limit: int, progress: OnProgress | None
) -> TokenStore:
    from filelock import FileLock

    root = cache_folder()
    folder = root / key[:32]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{key[:32]}.lock"):
            facts = _read_facts(folder)
            if facts is None:
                # This process holds the lock, so a staged folder was left by a killed process.
                clear_leftovers(root, of=folder.name.__eq__)
                with staging_folder(folder) as staging:
                    store = staging / "store"
                    store.mkdir()
                    with write_store(store) as writer:
                        facts = encode_source(source, encoder, writer, limit=limit, progress=progress)
                    about = {"layout": LAYOUT, "source": source.name, "facts": facts}
                    write_json(store / MARKER, about | {"bytes": store_sizes(store)})
                    put_in_place(store, folder, aside=staging / "damaged")
    except OSError as error:
        if error.errno not in NO_ROOM | {errno.EACCES, errno.EROFS}:
            raise
        raise UserError(
            f"The tokens of {source.name} cannot be cached in {root}.",
            why=f"{error.strerror}; they need about {source.size_bytes * 3 // 2 >> 20:,} MiB.",
            do=room_advice(disk_full_reason(error), "set CROSSTUNE_CACHE to a folder on another disk"),
        ) from error
    return open_store(folder, facts)


def _read_facts(folder: Path) -> dict[str, Any] | None:
    """Return the facts of a complete store; None when it is missing or damaged."""
    try:
        marker = read_object(folder / MARKER)
        sizes = store_sizes(folder)
    except (OSError, UnreadableFile):
        return None
    return marker["facts"] if marker.get("layout") == LAYOUT and marker.get("bytes") == sizes else None


def digest(value: Any) -> str:
    """Return the sha256 of a value in JSON types."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
