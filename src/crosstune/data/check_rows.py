"""Check the rows of a local dataset without tokenizing them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from crosstune.core.errors import UserError
from crosstune.data.encode import Encoder, RowPlace, check_any_answer, source_format
from crosstune.data.formats import has_empty_answer, to_conversation
from crosstune.data.named_datasets import BUNDLED, DUMMY
from crosstune.data.render_ahead import Request, render_ahead
from crosstune.data.rendering import shared_renderer
from crosstune.data.sources import Source, open_source
from crosstune.data.tokenizer import Tokenizer

MOST_BYTES = 64 << 20
"""Rows beyond this are checked by the training itself."""


def is_here(name: str) -> bool:
    """Return whether the dataset can be opened without a download."""
    return name in BUNDLED or name == DUMMY or Path(name).expanduser().exists()


def check_rows(
    name: str, *, asked_format: str, limit: int, tokenizer: Tokenizer | None, whole: bool
) -> list[str]:
    """Raise a UserError when a row does not fit the format or cannot be rendered; return a description of what was not
    checked.

    At most `limit` rows are read, or all when it is -1. Without a tokenizer no row is rendered; `whole` says that the
    answers need not be located.
    """
    if name == DUMMY or not is_here(name) or (name in BUNDLED and tokenizer is None):
        return []
    source = open_source(name)
    form = source_format(source, asked=asked_format)
    encoder = Encoder(tokenizer=tokenizer, form=form, whole=whole) if tokenizer is not None else None
    check = _Check(form=form, limit=limit, encoder=encoder)
    if tokenizer is None:
        for _ in check.requests(source):
            pass
    else:
        rows = render_ahead(check.requests(source), tokenizer.chat_tokens, renderer=shared_renderer())
        for place, rendered in rows:
            if isinstance(rendered, UserError):
                raise place.error(rendered)
    if check.is_cut:
        return [f"the rows of {name} beyond the first {check.num_rows:,}"]
    check_any_answer(name, form, num_rows=check.num_rows, num_empty=check.num_empty)
    return []


@dataclass
class _Check:
    """One pass over the rows of a source."""

    form: str
    limit: int
    encoder: Encoder | None
    num_rows: int = 0
    num_empty: int = 0
    is_cut: bool = False

    def requests(self, source: Source) -> Iterator[tuple[RowPlace, Request]]:
        """Read the rows, and yield those to render if there is an encoder."""
        for part, found, done_bytes in source.rows():
            if self.num_rows == self.limit:
                return
            if done_bytes > MOST_BYTES:
                self.is_cut = True
                return
            place = RowPlace(part, found.number, self.num_rows, done_bytes)
            self.num_rows += 1
            try:
                conversation = to_conversation(found.row, self.form)
                if has_empty_answer(conversation):
                    self.num_empty += 1
                elif self.encoder is not None:
                    yield place, self.encoder.to_request(conversation, found.row)
            except UserError as error:
                raise place.error(error) from error
