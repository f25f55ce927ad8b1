"""Check the rows of a local dataset without tokenizing them."""

from __future__ import annotations

from pathlib import Path

from crosstune.core.errors import UserError
from crosstune.data.encode import check_any_answer, source_format
from crosstune.data.formats import has_empty_answer, to_conversation
from crosstune.data.named_datasets import BUNDLED, DUMMY
from crosstune.data.sources import open_source

MOST_BYTES = 64 << 20
"""Rows beyond this are checked by the training itself."""


def is_here(name: str) -> bool:
    """Return whether the dataset can be opened without a download."""
    return name in BUNDLED or name == DUMMY or Path(name).expanduser().exists()


def check_rows(name: str, *, asked_format: str, limit: int) -> list[str]:
    """Raise a UserError when a row does not fit the format; return a description of what was not checked.

    At most `limit` rows are read, or all when it is -1.
    """
    if name in BUNDLED or name == DUMMY or not is_here(name):
        return []
    source = open_source(name)
    form = source_format(source, asked=asked_format)
    num_rows = num_empty = 0
    for part, found, done_bytes in source.rows():
        if num_rows == limit:
            break
        if done_bytes > MOST_BYTES:
            return [f"the rows of {name} beyond the first {num_rows:,}"]
        try:
            num_empty += has_empty_answer(to_conversation(found.row, form))
        except UserError as error:
            raise UserError(
                f"{part.place(found.number)}: {error.asked}", why=error.why, do=error.do
            ) from error
        num_rows += 1
    check_any_answer(name, form, num_rows=num_rows, num_empty=num_empty)
    return []
