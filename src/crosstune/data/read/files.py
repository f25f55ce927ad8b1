"""Read the rows of JSON, JSON Lines, CSV, TSV, Parquet and text files one by one. Errors report the line or row."""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from crosstune.core.errors import UserError, shown
from crosstune.data.read.styles import UTF8, WRAPPED, Style, style_of
from crosstune.files.json_files import FOREIGN, check_parsed, parse_json
from crosstune.files.plain_files import UnreadableFile, open_plain

Row = dict[str, Any]

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")
LARGEST_ROW_BYTES = 256 << 20
INSTALL_DATA = 'pip install "crosstune[data]"'

_CHUNK_BYTES = 1 << 20
_QUOTED = re.compile(rb'"(?:[^"]|"")*"')
_SEPARATORS = re.compile(r"[\s,]*")
_PARQUET_ROWS = 512
TEXT_CHARACTERS = 1 << 20
"""A longer text file is read as multiple documents of about this size, so that it need not fit into memory."""


class RawRow(NamedTuple):
    """A row, its line number (its row number in .json and .parquet), and the file offset of its end."""

    row: Row
    number: int
    end_byte: int
    error: UserError | None = None
    """Why this row cannot be read; the rows after it can."""


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """One file of a source."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def form(self) -> str:
        """`text` for text files, otherwise `auto`."""
        return "text" if self.is_text else "auto"

    @property
    def is_text(self) -> bool:
        """True for a text file, whose documents have any length."""
        return self.path.suffix.lower() == ".txt"

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size

    def place(self, number: int) -> str:
        by_line = self.path.suffix.lower() in (".jsonl", ".csv", ".tsv")
        return f"{self.path}, line {number}" if by_line else f"Row {number} of {self.path}"

    def digest(self) -> str:
        """Return the sha256 of the contents and the suffix; the rest of the file name does not matter."""
        total = hashlib.sha256(self.path.suffix.lower().encode())
        with _open(self.path) as file:
            while block := file.read(_CHUNK_BYTES):
                total.update(block)
        return total.hexdigest()

    def rows(self, *, keep_bad: bool = False) -> Iterator[RawRow]:
        """Yield the rows. A row that cannot be read raises its error; with `keep_bad`, it is yielded with its error."""
        for found in self._read():
            if found.error is not None and not keep_bad:
                raise found.error
            yield found

    def remark(self) -> str:
        """Describe an unusual encoding or layout of the file; return an empty string if there is none."""
        remarks = style_of(self.path).remarks(self.path.suffix.lower())
        return f"{self.name} is read as {' and '.join(remarks)}" if remarks else ""

    def _read(self) -> Iterator[RawRow]:
        suffix = self.path.suffix.lower()
        if suffix == ".parquet":
            yield from _read_parquet(self.path)
            return
        with _open(self.path) as file:
            style = style_of(self.path)
            if suffix == ".jsonl":
                yield from _read_lines(self.path, file, style)
            elif suffix == ".json":
                yield from _read_json(self.path, file, style)
            elif self.is_text:
                yield from _read_documents(self.path, file, style)
            else:
                yield from _read_csv(self.path, file, style)


def file_part(path: Path) -> FilePart:
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(
            f"{path} is not a supported data file.",
            do=f"use a file that ends in {' or '.join(SUFFIXES)}",
        )
    return FilePart(path=path)


def _open(path: Path) -> BinaryIO:
    try:
        return open_plain(path)
    except UnreadableFile as error:
        raise UserError(f"Cannot read the dataset {path}.", why=error.why, do=error.do) from error


class _Recoded:
    """The lines of a file in another encoding, as UTF-8."""

    def __init__(self, file: BinaryIO, encoding: str) -> None:
        self.text = io.TextIOWrapper(file, encoding=encoding, newline="\n")

    def readline(self, size: int) -> bytes:
        return self.text.readline(size).encode()


def _read_lines(path: Path, raw: BinaryIO, style: Style) -> Iterator[RawRow]:
    number = end_byte = 0
    file = raw if style.encoding == UTF8 else _Recoded(raw, style.encoding)
    while line := file.readline(LARGEST_ROW_BYTES):
        number += 1
        end_byte += len(line)
        if len(line) == LARGEST_ROW_BYTES:
            raise _too_large(f"{path}, line {number}")
        if not line.strip():
            continue
        try:
            row = parse_json(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, foreign=True)
        except ValueError as error:
            hint = "write one row per line, or an array of rows in a .json file"
            bad = UserError(f"{path}, line {number} is not JSON.", why=str(error), do=hint)
            yield RawRow({}, number, end_byte, bad)
            continue
        if isinstance(row, dict):
            yield RawRow(row, number, end_byte)
        else:
            bad = UserError(f"{path}, line {number} is not a row.", why="each line must be a JSON object.")
            yield RawRow({}, number, end_byte, bad)


def _read_json(path: Path, file: BinaryIO, style: Style) -> Iterator[RawRow]:
    """Read an array of rows in chunks; a file that starts with an object is read as JSON Lines, or as the array in it."""
    first = file.read(_CHUNK_BYTES).decode(style.encoding, errors="replace").lstrip()[:1]
    file.seek(0)
    if style.key:
        return _read_array(path, file, style)
    if first == "{":
        return _read_lines(path, file, style)
    if first and first != "[":
        raise UserError(f"{path} is not a list of rows.", why="it must be a JSON array of objects.")
    return _read_array(path, file, style) if first else iter(())


def _read_array(path: Path, raw: BinaryIO, style: Style) -> Iterator[RawRow]:
    file = io.TextIOWrapper(raw, encoding=style.encoding)
    text, number, ended = _read_text(path, file, _CHUNK_BYTES), 0, False
    wrapped = WRAPPED.match(text) if style.key else None
    place = (wrapped.end() if wrapped is not None else text.index("[")) + 1
    while True:
        place = _SEPARATORS.match(text, place).end()  # type: ignore[union-attr]
        if place < len(text) and text[place] == "]":
            rest = (text[place + 1 :] + _read_text(path, file, -1)).strip()
            if not (_ends_object(rest) if style.key else not rest):
                raise UserError(f"{path} is not JSON.", why=f"text follows the array: {rest[:40]!r}")
            return
        try:
            row, end = FOREIGN.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            if ended:
                raise UserError(
                    f"{path} is not JSON: row {number + 1} cannot be read.", why=str(error)
                ) from error
            text, place = text[place:], 0
            if len(text) > LARGEST_ROW_BYTES:
                raise _too_large(f"Row {number + 1} of {path}") from error
            # Double the chunk each time, so that a large row is not parsed many times.
            more = _read_text(path, file, max(_CHUNK_BYTES, len(text)))
            ended = not more
            text += more
            continue
        number += 1
        try:
            if not isinstance(row, dict):
                raise ValueError(f"it is not a JSON object: {shown(row)}")
            check_parsed(row, text[place:end], foreign=True)
            yield RawRow(row, number, raw.tell())
        except ValueError as error:
            bad = UserError(f"Row {number} of {path} cannot be read.", why=f"{error}.")
            yield RawRow({}, number, raw.tell(), bad)
        place = end


def _ends_object(rest: str) -> bool:
    """Return True if this text completes an object after its first value."""
    try:
        parse_json('{"rows": 0' + rest, foreign=True)
    except ValueError:
        return False
    return True


def _read_text(path: Path, file: io.TextIOWrapper, size: int) -> str:
    try:
        return file.read(size)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text.", why=str(error)) from error


def _read_csv(path: Path, file: BinaryIO, style: Style) -> Iterator[RawRow]:
    csv.field_size_limit(LARGEST_ROW_BYTES)  # the default of 128 KiB is too small for long answers
    lines, delimiter = _decoded_lines(path, file, style), style.separator
    quoting: Any = csv.QUOTE_NONE if delimiter == "\t" and _has_bare_quotes(path) else csv.QUOTE_MINIMAL
    reader = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
    header: list[str] | None = None
    line = 1
    try:
        for values in reader:
            start, line = line, reader.line_num + 1
            if not values:
                continue
            if header is None:
                header = [name.strip() for name in values]
                if not all(header) or len(set(header)) < len(header):
                    raise UserError(
                        f"{path}, line 1 does not list the columns.",
                        why=f"every column needs a unique name; found {', '.join(map(repr, header))}.",
                    )
                continue
            if len(values) != len(header):
                bad = UserError(
                    f"{path}, line {start} has {len(values)} fields instead of {len(header)}.",
                    why=f"the header lists the columns {', '.join(header)}.",
                    do="quote fields that contain a separator or a line break",
                )
                yield RawRow({}, start, file.tell(), bad)
                continue
            yield RawRow(dict(zip(header, values, strict=True)), start, file.tell())
    except csv.Error as error:
        raise UserError(f"{path}, line {line} cannot be read.", why=str(error)) from error


def _has_bare_quotes(path: Path) -> bool:
    """Return True if quotes in a .tsv file are text: some field begins with a quote but is not quoted, and every line has
    as many tabs as the first."""
    found, num_fields = False, 0
    with _open(path) as file:
        for line in file:
            fields = line.rstrip(b"\r\n").split(b"\t")
            num_fields = num_fields or len(fields)
            if len(fields) != num_fields and line.strip():
                return False
            found = found or any(field[:1] == b'"' and not _QUOTED.fullmatch(field) for field in fields)
    return found


def _read_documents(path: Path, file: BinaryIO, style: Style) -> Iterator[RawRow]:
    """Read a text file as one document, or, if it is large, as several that end at a blank line."""
    number, lines, characters = 0, list[str](), 0
    for line in _decoded_lines(path, file, style):
        lines.append(line.replace("\r\n", "\n"))
        characters += len(line)
        at_blank_line = characters >= TEXT_CHARACTERS and not line.strip()
        if at_blank_line or characters >= 2 * TEXT_CHARACTERS:
            number += 1
            yield RawRow({"text": "".join(lines).strip("\n")}, number, file.tell())
            lines, characters = [], 0
    if text := "".join(lines).strip("\n"):
        yield RawRow({"text": text}, number + 1, path.stat().st_size)


def _decoded_lines(path: Path, file: BinaryIO, style: Style) -> Iterator[str]:
    """Yield the decoded lines. Each is checked by itself, since the decoder reads ahead and would report a different line."""
    errors = "surrogateescape" if style.encoding == UTF8 else "strict"
    text = io.TextIOWrapper(file, encoding=style.encoding, errors=errors, newline="")
    for number, line in enumerate(text, start=1):
        try:
            line.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{path}, line {number} is not UTF-8 text.",
                why=f"character {error.start + 1} of the line is the byte 0x{ord(line[error.start]) - 0xDC00:02x}.",
                do="save the file as UTF-8",
            ) from error
        yield line


def _read_parquet(path: Path) -> Iterator[RawRow]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(
            f"Cannot read {path}.", why="Parquet files need pyarrow.", do=f"run: {INSTALL_DATA}"
        ) from error
    number = 0
    try:
        with _open(path) as opened, pq.ParquetFile(opened) as file:
            size = os.fstat(opened.fileno()).st_size
            total = file.metadata.num_rows
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield RawRow(row, number, size * number // total)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(
            f"{path} cannot be read as Parquet.",
            why=f"after row {number}: {' '.join(str(error).split())[:200]}",
        ) from error


def _too_large(place: str) -> UserError:
    return UserError(
        f"{place} is larger than {LARGEST_ROW_BYTES >> 20} MiB.",
        why="rows are read one at a time, and each must fit into memory.",
        do="split it into smaller rows",
    )
