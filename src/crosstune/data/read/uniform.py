"""Divide a source into sources of one format each, whose rows have the columns of that format."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from crosstune.core.errors import UserError
from crosstune.data.read.columns import Columns, check_columns, describe_columns, read_part
from crosstune.data.read.files import FilePart, Row
from crosstune.data.read.sources import Part, Source


def uniform_sources(source: Source, *, asked: str, columns: Columns) -> list[Source]:
    """Return the parts of a source, grouped by format in the order of their first part.

    The format is the requested one, or implied by the source's name or by each part's first row.
    """
    if asked == "auto":
        asked = source.form
    groups: dict[tuple[str, Sequence[tuple[str, str]], bool], list[Part]] = {}
    for part in source.parts:
        found = read_part(part, asked=asked, columns=columns, source=_described(part, source))
        if found is None:
            continue
        form, used = found
        renames = tuple(used.items())
        splits = isinstance(part, FilePart) and part.is_text
        groups.setdefault((form, renames, splits), []).append(part)
    if not groups:
        raise UserError(f"The dataset {source.name} is empty.", do="give it at least one row")
    return [
        replace(source, parts=tuple(parts), held_out=(), form=form, columns=tuple(renames), splits=splits)
        for (form, renames, splits), parts in groups.items()
    ]


def check_mapped(sources: Sequence[Source], columns: Columns) -> None:
    """Raise a UserError for a column of --columns that no source has."""
    if columns:
        parts = [part for source in sources for part in source.parts]
        check_columns(parts, columns, source=" and ".join(source.name for source in sources))


def pick_rows(sources: Sequence[Source], indices: Collection[int]) -> list[tuple[Row, str]]:
    """Return the rows with these indices, counted over all sources, and their formats. Stop after the last of them."""
    wanted, last = set(indices), max(indices, default=-1)
    picked: list[tuple[Row, str]] = []
    index = 0
    for source in sources:
        for _, found, _ in source.rows():
            if index > last:
                return picked
            if index in wanted:
                picked.append((found.row, source.form))
            index += 1
    return picked


def renamed_columns(sources: Sequence[Source], asked: Mapping[str, str]) -> list[str]:
    """Return a sentence for each source whose columns were renamed."""
    sentences = []
    for source in sources:
        if source.columns:
            hint = "" if asked else "; --columns chooses others"
            names = [part.name for part in source.parts]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            sentences.append(f"{names[0]}{more}: {describe_columns(dict(source.columns))}{hint}")
    return list(dict.fromkeys(sentences))


def _described(part: Part, source: Source) -> str:
    return part.name if len(source.parts) > 1 else source.name
