"""Detect the format of each part of a source, and map its columns to the format: by --columns or by common names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from crosstune.core.errors import UserError
from crosstune.core.names import did_you_mean
from crosstune.data.read.files import FilePart
from crosstune.data.read.files import Row as FileRow
from crosstune.data.read.formats import COLUMNS, OPTIONAL_COLUMNS, Row, detect_format, fitting_formats
from crosstune.data.read.sources import Part, Source, folder_of, rename

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
    """Parse `query=prompt,reply=completion`; `targets` are the columns that a recipe reads. Names may contain , and =."""
    found: dict[str, str] = {}
    held = ""
    for piece in text.split(",") if text else ():
        source, equals, target = (part.strip() for part in f"{held}{piece}".rpartition("="))
        held = "" if equals else f"{held}{piece},"
        if equals and target not in targets:
            hint = f"write {target}={source}; " if source in targets else did_you_mean(target, targets)
            raise UserError(
                f"--columns cannot map {source} to '{target}'.",
                why="the data's column comes first, then a column that a format reads.",
                do=f"{hint}map it to one of: {', '.join(targets)}",
            )
        if equals and source and source not in found and target not in found.values():
            found[source] = target
        elif equals:
            held = piece
            break
    if held:
        raise UserError(
            f"--columns cannot be '{text}'.",
            why=f"in '{held.rstrip(',')}', a name is missing or occurs twice.",
            do="list each column once, as in --columns query=prompt,reply=completion",
        )
    return found


def split_by_format(source: Source, *, asked: str, columns: Columns) -> list[Source]:
    """Divide a source into sources of one format each, in order, and set the columns to rename. The format is as requested,
    or follows from the source's name or each part's first row."""
    if asked == "auto":
        asked = source.form
    groups: dict[tuple[str, Sequence[tuple[str, str]], bool], list[Part]] = {}
    unreadable: list[Part] = []
    for part in source.parts:
        name = part.name if len(source.parts) > 1 else source.name
        good = (found.row for found in source.rows_of(part) if found.error is None)
        # The first row determines the format, but it may lack an optional column of --columns.
        rows = list(islice(good, _ROWS_LOOKED_AT if columns else 1))
        found = _read_part(part, rows, asked=asked, columns=columns, source=name) if rows else None
        if found is not None:
            form, used = found
            splits = isinstance(part, FilePart) and part.is_text
            groups.setdefault((form, tuple(used.items()), splits), []).append(part)
        elif next(iter(source.rows_of(part)), None) is not None:
            unreadable.append(part)
    if not groups:
        raise _no_rows(source, unreadable)
    next(iter(groups.values())).extend(unreadable)  # their rows are counted and skipped
    return [
        replace(source, parts=tuple(parts), held_out=(), form=form, columns=tuple(renames), splits=splits)
        for (form, renames, splits), parts in groups.items()
    ]


def _no_rows(source: Source, unreadable: Sequence[Part]) -> UserError:
    if not unreadable:
        return UserError(f"The dataset {source.name} is empty.", do="add at least one row")
    first = next(iter(source.rows_of(unreadable[0]))).error
    assert first is not None
    return UserError(
        f"No row of {source.name} can be read.",
        why=f"the first: {first.message} {first.why}",
        do=first.do or "check the format of the file",
    )


def pick_rows(sources: Sequence[Source], indices: Collection[int]) -> list[tuple[FileRow, str, Path | None]]:
    """Return the rows with these indices, counted across all sources, their formats and folders. Stop after the last."""
    wanted, last = set(indices), max(indices, default=-1)
    rows = (
        (found.row, source.form, folder_of(part)) for source in sources for part, found, _ in source.rows()
    )
    return [row for index, row in enumerate(islice(rows, last + 1)) if index in wanted]


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


def check_columns(sources: Sequence[Source], columns: Columns) -> None:
    """Raise a UserError for a column of --columns that no source has."""
    if not columns:
        return
    rows = (
        found.row
        for source in sources
        for part in source.parts
        for found in islice(source.rows_of(part), _ROWS_LOOKED_AT)
    )
    present = dict.fromkeys(str(name) for row in rows for name in row)
    for name in columns:
        if name not in present:
            names = " and ".join(source.name for source in sources)
            raise UserError(
                f"{names} has no column '{name}', which --columns maps to {columns[name]}.",
                do=f"{did_you_mean(name, present)}its columns are: {', '.join(present)}",
            )


def _read_part(
    part: Part, rows: Sequence[Row], *, asked: str, columns: Columns, source: str
) -> tuple[str, Columns]:
    """Return the format of a part that begins with these rows, and the columns to rename."""
    present = {name for row in rows for name in row}
    used: Columns = {name: target for name, target in columns.items() if name in present}
    first = rename(rows[0], used)
    if asked == "auto" and used:
        return _format_of_targets(first, used, source=source), used
    if asked == "auto" and part.form == "auto" and not fitting_formats(first):
        used = _well_known(first)
        first = rename(first, used)
    return detect_format(first, asked=part.form if asked == "auto" else asked, source=source), used


def _describe_columns(columns: Columns) -> str:
    return ", ".join(f"{source} as {target}" for source, target in columns.items())


def _format_of_targets(first: Row, used: Columns, *, source: str) -> str:
    """Return the format that reads a column of --columns; it takes precedence over other matching formats."""
    fitting = fitting_formats(first)
    for form in fitting:
        if any(target in COLUMNS[form] for target in used.values()):
            return detect_format(first, asked=form, source=source)
    if fitting and all(target in OPTIONAL_COLUMNS for target in used.values()):
        return detect_format(first, asked="auto", source=source)
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
    """Return the renames for a row with other common names for its columns, or with names in upper case."""
    lower = {str(name).strip().lower(): str(name) for name in row}
    if len(lower) == len(row) and list(lower) != list(lower.values()):
        plain = {name: row[column] for name, column in lower.items()}
        used = {} if fitting_formats(plain) else _well_known(plain)
        needed = {name for form in fitting_formats(rename(plain, used))[:1] for name in COLUMNS[form]}
        new_names = {name: used.get(name, name) for name in lower}
        return {
            lower[name]: target
            for name, target in new_names.items()
            if lower[name] != target and (target in needed or target in OPTIONAL_COLUMNS) and needed
        }
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
