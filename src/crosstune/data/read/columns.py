"""Map the columns of a dataset to those of a format: by --columns, or by common names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from crosstune.core.errors import UserError
from crosstune.core.names import did_you_mean
from crosstune.data.read.formats import COLUMNS, OPTIONAL_COLUMNS, Row, fitting_formats, recognise
from crosstune.data.read.sources import Part, rename

TARGETS = tuple(dict.fromkeys([*(name for names in COLUMNS.values() for name in names), *OPTIONAL_COLUMNS]))
"""The columns that a format reads."""

# Other names of the question and of the answer. They are used only if a row has exactly one of each.
_QUESTIONS = ("prompt", "question", "instruction", "input", "query", "problem")
_ANSWERS = ("completion", "answer", "output", "response", "reply", "solution")
_CONVERSATIONS = ("conversation", "dialogue", "dialog", "chat")
_ROWS_LOOKED_AT = 64

Columns = Mapping[str, str]
"""Column of the dataset -> column that the format reads."""


def parse_columns(text: str | None, *, targets: Sequence[str] = TARGETS) -> dict[str, str]:
    """Read `query=prompt,reply=completion`. The name of a column may have commas and equals signs in it.

    `targets` are the columns that a recipe reads.
    """
    found: dict[str, str] = {}
    held = ""
    for piece in (text or "").split(",") if text else ():
        source, equals, target = f"{held}{piece}".rpartition("=")
        if not equals:
            held += f"{piece},"
            continue
        held, source, target = "", source.strip(), target.strip()
        if target not in targets and source in targets:
            raise UserError(
                f"--columns cannot map {source} to '{target}'.",
                why=f"the column of the file comes first, and {source} is a name of ours.",
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
                why=f"{source or 'a column without a name'} or {target} occurs twice."
                if source
                else "a column has no name.",
                do="name each column once, as in --columns query=prompt,reply=completion",
            )
        found[source] = target
    if held:
        raise UserError(
            f"--columns cannot be '{text}'.",
            why=f"'{held.rstrip(',')}' has no target.",
            do="write --columns query=prompt,reply=completion",
        )
    return found


def read_part(part: Part, *, asked: str, columns: Columns, source: str) -> tuple[str, Columns] | None:
    """Return the format of a part and the columns to rename; None for a part without rows."""
    # The first row decides the format, but it may lack an optional column of --columns.
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


def check_columns(parts: list[Part], columns: Columns, *, source: str) -> None:
    """Raise a UserError for a column of --columns that is in none of the parts."""
    present: dict[str, None] = {}
    for part in parts:
        for found in islice(part.rows(), _ROWS_LOOKED_AT):
            present |= dict.fromkeys(map(str, found.row))
    for name in columns:
        if name not in present:
            raise UserError(
                f"{source} has no column '{name}', which --columns maps to {columns[name]}.",
                do=f"{did_you_mean(name, present)}its columns are: {', '.join(present)}",
            )


def describe_columns(columns: Columns) -> str:
    return ", ".join(f"{source} as {target}" for source, target in columns.items())


def _format_of_targets(first: Row, used: Columns, *, source: str) -> str:
    """Return the format that reads a column of --columns; it takes precedence over other fitting formats."""
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
        f"--columns does not give all columns of a format: {describe_columns(used)}.",
        why=f"{'; '.join(needs) or 'no format can be recognised'}. The columns of {source} are then: "
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
