"""Find the format of each part of a source, and map its columns to those of the format: by --columns or by common names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from crosstune.core.errors import UserError
from crosstune.core.names import did_you_mean
from crosstune.data.read.files import FilePart
from crosstune.data.read.files import Row as FileRow
from crosstune.data.read.formats import COLUMNS, OPTIONAL_COLUMNS, Row, fitting_formats, recognise
from crosstune.data.read.sources import Part, Source, rename

TARGETS = tuple(dict.fromkeys([*(name for names in COLUMNS.values() for name in names), *OPTIONAL_COLUMNS]))
"""The columns that a format reads."""

# Other names for question and answer. They are used only if a row has exactly one of each.
_QUESTIONS = ("prompt", "question", "instruction", "input", "query", "problem")
_ANSWERS = ("completion", "answer", "output", "response", "reply", "solution")
_CONVERSATIONS = ("conversation", "dialogue", "dialog", "chat")
_ROWS_LOOKED_AT = 64

Columns = Mapping[str, str]
"""Column of the dataset -> column that the format reads."""


def parse_columns(text: str | None, *, targets: Sequence[str] = TARGETS) -> dict[str, str]:
    """Parse `query=prompt,reply=completion`. Column names may contain commas and equals signs.

    `targets` are the columns that a recipe reads.
    """
    found: dict[str, str] = {}
    held = ""
    for piece in text.split(",") if text else ():
        source, equals, target = f"{held}{piece}".rpartition("=")
        if not equals:
            held += f"{piece},"
            continue
        held, source, target = "", source.strip(), target.strip()
        if target not in targets and source in targets:
            raise UserError(
                f"--columns cannot map {source} to '{target}'.",
                why=f"the file's column comes first, and {source} is a crosstune column.",
                do=f"write it the other way round: {target}={source}",
            )
        if target not in targets:
            raise UserError(
                f"--columns cannot map {source} to '{target}'.",
                why="no format reads such a column.",
                do=f"{did_you_mean(target, targets)}map it to one of: {', '.join(targets)}",
            )
        if not source or source in found or target in found.values():
            raise UserError(
                f"--columns cannot be '{text}'.",
                why=f"{source} or {target} occurs twice." if source else "a column has no name.",
                do="list each column once, as in --columns query=prompt,reply=completion",
            )
        found[source] = target
    if held:
        raise UserError(
            f"--columns cannot be '{text}'.",
            why=f"'{held.rstrip(',')}' has no target.",
            do="write --columns query=prompt,reply=completion",
        )
    return found


def uniform_sources(source: Source, *, asked: str, columns: Columns) -> list[Source]:
    """Divide a source into sources of one format each, in the order of their first parts, and set the columns to rename.

    The format is as requested, or follows from the source's name or each part's first row.
    """
    if asked == "auto":
        asked = source.form
    groups: dict[tuple[str, Sequence[tuple[str, str]], bool], list[Part]] = {}
    for part in source.parts:
        name = part.name if len(source.parts) > 1 else source.name
        found = _read_part(part, asked=asked, columns=columns, source=name)
        if found is not None:
            form, used = found
            splits = isinstance(part, FilePart) and part.is_text
            groups.setdefault((form, tuple(used.items()), splits), []).append(part)
    if not groups:
        raise UserError(f"The dataset {source.name} is empty.", do="add at least one row")
    return [
        replace(source, parts=tuple(parts), held_out=(), form=form, columns=tuple(renames), splits=splits)
        for (form, renames, splits), parts in groups.items()
    ]


def pick_rows(sources: Sequence[Source], indices: Collection[int]) -> list[tuple[FileRow, str]]:
    """Return the rows with these indices, counted across all sources, and their formats. Stop after the last."""
    wanted, last = set(indices), max(indices, default=-1)
    picked: list[tuple[FileRow, str]] = []
    index = 0
    for source in sources:
        for _, found, _ in source.rows():
            if index > last:
                return picked
            if index in wanted:
                picked.append((found.row, source.form))
            index += 1
    return picked


def renamed_columns(sources: Sequence[Source], asked: Columns) -> list[str]:
    """Return a sentence for each source whose columns were renamed."""
    sentences = []
    for source in sources:
        if source.columns:
            hint = "" if asked else "; --columns chooses others"
            names = [part.name for part in source.parts]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            sentences.append(f"{names[0]}{more}: {_describe_columns(dict(source.columns))}{hint}")
    return list(dict.fromkeys(sentences))


def check_columns(parts: list[Part], columns: Columns, *, source: str) -> None:
    """Raise a UserError for a column of --columns that is in none of the parts."""
    if not columns:
        return
    rows = (found.row for part in parts for found in islice(part.rows(), _ROWS_LOOKED_AT))
    present = dict.fromkeys(str(name) for row in rows for name in row)
    for name in columns:
        if name not in present:
            raise UserError(
                f"{source} has no column '{name}', which --columns maps to {columns[name]}.",
                do=f"{did_you_mean(name, present)}its columns are: {', '.join(present)}",
            )


def check_mapped(sources: Sequence[Source], columns: Columns) -> None:
    """Raise a UserError for a column of --columns that no source has."""
    parts = [part for source in sources for part in source.parts]
    check_columns(parts, columns, source=" and ".join(source.name for source in sources))


def _read_part(part: Part, *, asked: str, columns: Columns, source: str) -> tuple[str, Columns] | None:
    """Return the format of a part and the columns to rename; None for a part without rows."""
    # The first row determines the format, but it may lack an optional column of --columns.
    rows = [found.row for found in islice(part.rows(), _ROWS_LOOKED_AT if columns else 1)]
    if not rows:
        return None
    present = {name for row in rows for name in row}
    used = {name: target for name, target in columns.items() if name in present}
    first = rename(rows[0], used)
    if asked == "auto" and part.form != "auto" and not used:
        return recognise(first, asked=part.form, source=source), used
    if asked != "auto":
        return recognise(first, asked=asked, source=source), used
    if used:
        return _format_of_targets(first, used, source=source), used
    if not fitting_formats(first) and (aliases := _well_known(first)):
        return recognise(rename(first, aliases), asked="auto", source=source), aliases
    return recognise(first, asked="auto", source=source), used


def _describe_columns(columns: Columns) -> str:
    return ", ".join(f"{source} as {target}" for source, target in columns.items())


def _format_of_targets(first: Row, used: Columns, *, source: str) -> str:
    """Return the format that reads a column of --columns; it takes precedence over other matching formats."""
    fitting = fitting_formats(first)
    for form in fitting:
        if any(target in COLUMNS[form] for target in used.values()):
            return recognise(first, asked=form, source=source)
    if fitting and all(target in OPTIONAL_COLUMNS for target in used.values()):
        return recognise(first, asked="auto", source=source)
    needs = [
        f"{form} needs {' and '.join(column for column in names if column not in first)} too"
        for form, names in COLUMNS.items()
        if any(target in names for target in used.values())
    ]
    raise UserError(
        f"--columns does not provide all columns of a format: {_describe_columns(used)}.",
        why=f"{'; '.join(needs) or 'no format can be recognized'}. The columns of {source} are then: "
        f"{', '.join(map(str, first))}.",
        do="map the missing column too",
    )


def _well_known(row: Row) -> Columns:
    """Return the renames for a row with other common names for its question and answer."""
    lists = [name for name in _CONVERSATIONS if isinstance(row.get(name), list)]
    if len(lists) == 1:
        return {lists[0]: "messages"}
    questions = [name for name in _QUESTIONS if name in row]
    answers = [name for name in _ANSWERS if name in row]
    if len(answers) != 1:
        return {}
    if questions == ["instruction", "input"]:
        return {answers[0]: "output"}
    if len(questions) != 1:
        return {}
    targets = ("question", "answer") if "context" in row else ("prompt", "completion")
    return {
        source: target
        for source, target in zip((questions[0], answers[0]), targets, strict=True)
        if source != target
    }
