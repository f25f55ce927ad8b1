"""Read rows with prompts for the recipes that learn from answers: training and held-out rows that share no prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.data.open_data import HELD_OUT_SHARE
from crosstune.data.read.columns import check_columns, parse_columns
from crosstune.data.read.dataset_list import unweighted
from crosstune.data.read.files import Row
from crosstune.data.read.formats import Turn
from crosstune.data.read.sources import Source, open_source, row_error, skipped_row

_SPLIT_KEY = 2**34
"""Separates the random stream of the split from other streams with the same seed."""


class HasPrompt(Protocol):
    @property
    def prompt(self) -> Sequence[Turn]: ...

    @property
    def tools(self) -> Sequence[Any] | None: ...

    @property
    def place(self) -> str: ...


T = TypeVar("T", bound=HasPrompt)
ReadRow = Callable[[Row, str], Sequence[T]]
"""Reads a row from its columns and its place; returns nothing for a row that is left out."""


@dataclass(kw_only=True)
class PromptRows(Generic[T]):
    train: Sequence[T] = ()
    held_out: Sequence[T] = ()
    num_rows: int = 0
    num_left_out: int = 0
    num_too_long: int = 0
    """Rows that do not fit the context, once they are tokenized."""
    skipped: list[str] = field(default_factory=list)
    """Rows that cannot be read, as JSON text: file, line and reason."""
    first_error: UserError | None = None
    """The error of the first skipped row, with its place."""
    notes: list[str] = field(default_factory=list)


def read_prompt_rows(config: Config, read: ReadRow[T], *, targets: Collection[str]) -> PromptRows[T]:
    """Read the sources of --dataset and --eval_dataset; hold out a fraction of the prompts if there is no evaluation data.

    `targets` are the columns that --columns may map to. Raises the error of the first row if no row can be read.
    """
    found, train, held_out = PromptRows[T](), list[T](), list[T]()
    evaluates = not config.skip_eval and config.eval_samples > 0
    columns = parse_columns(config.columns, targets=tuple(targets))

    def rows_of(source: Source, *, limit: int) -> list[T]:
        check_columns([source], columns)
        source = replace(source, skips_bad=config.skip_bad_rows)
        if columns:
            source = replace(source, columns=tuple(columns.items()))
        return _read(source, read, found, skips_bad=config.skip_bad_rows, limit=limit)

    for entry in unweighted(config.dataset, option="dataset"):
        source = open_source(entry.name)
        train += rows_of(source, limit=config.dataset_samples)
        if source.held_out and evaluates and not config.eval_dataset:
            held_out += rows_of(source.own_held_out(), limit=config.eval_samples)
    if config.eval_dataset and evaluates:
        for entry in unweighted(config.eval_dataset, option="eval_dataset"):
            source = open_source(entry.name, needs_training=False)
            own = source.own_held_out() if source.held_out else source
            held_out += rows_of(own, limit=config.eval_samples)
    if not train and found.first_error is not None and not found.num_left_out:
        raise found.first_error
    if evaluates and train and not held_out:
        train, held_out = _hold_out(train, config)
        found.notes.append(
            f"rows held out, with all rows of their prompts: {num_rows(held_out):,}"
            if held_out
            else "no rows are held out, so nothing is evaluated: every prompt has more rows than --eval_fraction and "
            "--eval_samples allow; raise them, or pass --eval_dataset"
        )
    most = config.eval_samples if config.eval_fraction is None else None
    return replace(found, train=train, held_out=held_out[:most])


def _read(source: Source, read: ReadRow[T], found: PromptRows[T], *, skips_bad: bool, limit: int) -> list[T]:
    """Return what a source contains, at most about `limit` unless that is -1, and count its rows in `found`."""
    kept: list[T] = []
    for part, row, _ in source.rows():
        if limit != -1 and len(kept) >= limit:
            break
        found.num_rows += 1
        try:
            if row.error is not None:
                raise row.error
            own = read(row.row, part.place(row.number))
        except UserError as error:
            placed = error if row.error is not None else row_error(error, part, row.number)
            if not skips_bad:
                raise placed from error
            found.first_error = found.first_error or placed
            found.skipped.append(skipped_row(error, part, row.number))
            continue
        found.num_left_out += not own
        kept += own
    return kept


def num_rows(found: Iterable[HasPrompt]) -> int:
    """Return the number of different rows that prompts or answers are from."""
    return len({one.place for one in found})


def prompt_key(row: HasPrompt) -> str:
    """Return a text that is equal for equal prompts."""
    return json.dumps([row.prompt, row.tools], sort_keys=True, default=str)


def _hold_out(rows: Sequence[T], config: Config) -> tuple[list[T], list[T]]:
    """Hold out a fraction of the rows at random, whole prompts at a time."""
    keys = [prompt_key(row) for row in rows]
    names, groups = np.unique(keys, return_inverse=True)
    fraction = HELD_OUT_SHARE if config.eval_fraction is None else config.eval_fraction
    most = int(len(rows) * fraction)
    if config.eval_fraction is None or "eval_samples" in config.sources:
        most = min(most, config.eval_samples)
    sizes, left, chosen = np.bincount(groups), most, set[int]()
    draw = np.random.Generator(np.random.Philox(key=(config.seed, _SPLIT_KEY)))
    for group in draw.permutation(len(names)):
        if sizes[group] <= left and len(chosen) + 1 < len(names):
            chosen.add(int(group))
            left -= int(sizes[group])
    held = [int(group) in chosen for group in groups]
    return (
        [row for row, out in zip(rows, held, strict=True) if not out],
        [row for row, out in zip(rows, held, strict=True) if out],
    )
