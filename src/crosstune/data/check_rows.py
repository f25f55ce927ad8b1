"""Check the rows of a local dataset without tokenizing them."""

from __future__ import annotations

from pathlib import Path

from crosstune.core.errors import UserError
from crosstune.data.columns import Columns
from crosstune.data.dataset_list import parse_dataset, unweighted
from crosstune.data.encode import check_any_answer
from crosstune.data.formats import has_empty_answer, to_conversation
from crosstune.data.named_datasets import BUNDLED, DUMMY
from crosstune.data.sources import Source, open_source
from crosstune.data.uniform import check_mapped, uniform_sources

MOST_BYTES = 64 << 20
"""Rows beyond this are checked by the training itself."""


def is_here(name: str) -> bool:
    """Return whether all sources of a dataset can be opened without a download."""
    return all(_is_here(entry.name) for entry in parse_dataset(name))


def check_rows(
    name: str, *, asked_format: str, limit: int, columns: Columns, training: bool = True
) -> list[str]:
    """Raise a UserError when a row does not fit the format; return a description of what was not checked.

    At most `limit` rows of each source are read, or all when it is -1. `training` tells the data to train on from that
    to evaluate on.
    """
    entries = parse_dataset(name) if training else unweighted(name, option="eval_dataset")
    names = [entry.name for entry in entries]
    local = [one for one in names if _is_here(one) and one not in (*BUNDLED, DUMMY)]
    sources = [open_source(one, needs_training=training) for one in local]
    if training and len(sources) == len(names):
        check_mapped(sources, columns)
    left: list[str] = []
    for source in sources:
        if not training and source.held_out:
            source = source.own_held_out()
        for uniform in uniform_sources(source, asked=asked_format, columns=columns):
            left += _check(uniform, limit=limit)
    return left


def _is_here(name: str) -> bool:
    return name in BUNDLED or name == DUMMY or Path(name).expanduser().exists()


def _check(source: Source, *, limit: int) -> list[str]:
    num_rows = num_empty = 0
    for part, found, done_bytes in source.rows():
        if num_rows == limit:
            break
        if done_bytes > MOST_BYTES:
            return [f"the rows of {source.name} beyond the first {num_rows:,}"]
        try:
            num_empty += has_empty_answer(to_conversation(found.row, source.form))
        except UserError as error:
            raise UserError(
                f"{part.place(found.number)}: {error.asked}", why=error.why, do=error.do
            ) from error
        num_rows += 1
    check_any_answer(source.name, source.form, num_rows=num_rows, num_empty=num_empty)
    return []
