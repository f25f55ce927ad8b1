"""Recognize how a data file is written: its encoding, the separator of a table, and the key of wrapped JSON rows."""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from crosstune.files.plain_files import open_plain

UTF8 = "utf-8-sig"
_BLOCK_BYTES = 1 << 20
_HEAD_BYTES = 64 << 10
_SEQUENCE = re.compile(rb"[\xc2-\xf4][\x80-\xbf]{1,3}")
_HIGH = re.compile(rb"[\x80-\xff]")
_NOT_WINDOWS = re.compile(rb"[\x00\x81\x8d\x8f\x90\x9d]")
"""Bytes that Windows-1252 text does not contain."""
_SCALAR = r'(?:"(?:[^"\\]|\\.)*"|[-+.\w]+)'
WRAPPED = re.compile(
    rf'\s*\{{\s*(?:"(?:[^"\\]|\\.)*"\s*:\s*{_SCALAR}\s*,\s*)*"(data|rows|examples|items|train)"\s*:\s*(?=\[\s*[\{{\]])'
)
"""The beginning of an object whose value under a usual key is a list of rows, after values that are not lists."""
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}
_ENCODINGS = {"utf-16": "UTF-16", "cp1252": "Windows-1252 (Latin-1)"}


@dataclass(frozen=True)
class Style:
    """Encoding, separator and nesting of a file, if unusual."""

    encoding: str = UTF8
    separator: str = ","
    key: str = ""
    """The key of the rows in a .json file that is an object."""

    def remarks(self, suffix: str) -> list[str]:
        """Describe unusual properties, as phrases after "read as"."""
        usual = "\t" if suffix == ".tsv" else ","
        return [
            *([f"{_ENCODINGS[self.encoding]} text"] if self.encoding != UTF8 else ()),
            *([f"a table with {_SEPARATORS[self.separator]}"] if self.separator != usual else ()),
            *([f'the rows in its "{self.key}" list'] if self.key else ()),
        ]


def style_of(path: Path) -> Style:
    """Return the style of a file, kept until the file changes."""
    about = path.stat()
    return _find_style(path, about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=1024)
def _find_style(path: Path, _size: int, _changed: int) -> Style:
    suffix = path.suffix.lower()
    usual = Style(separator="\t" if suffix == ".tsv" else ",")
    if suffix == ".parquet":
        return usual
    encoding = _encoding(path)
    with open_plain(path) as file:
        head = file.read(_HEAD_BYTES).decode(encoding, errors="replace")
    separator, key = usual.separator, ""
    if suffix == ".csv":
        separator = _separator(head)
    elif suffix == ".json" and (found := WRAPPED.match(head)):
        key = found[1]
    return Style(encoding, separator, key)


def _encoding(path: Path) -> str:
    """Return utf-16 for its byte order mark, cp1252 for text that is not UTF-8 but can be Windows-1252, otherwise UTF-8. In a
    damaged UTF-8 file, most bytes above 127 are still in valid sequences; the reader reports its bad line."""
    with open_plain(path) as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            return "utf-16"
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for block in _blocks(path):
            decoder.decode(block)
        return UTF8
    except UnicodeDecodeError:
        pass
    num_high = num_in_sequences = 0
    for block in _blocks(path):
        if _NOT_WINDOWS.search(block):
            return UTF8
        num_high += len(_HIGH.findall(block))
        num_in_sequences += sum(map(len, _SEQUENCE.findall(block)))
    return UTF8 if 2 * num_in_sequences >= num_high else "cp1252"


def _blocks(path: Path) -> Iterator[bytes]:
    with open_plain(path) as file:
        while block := file.read(_BLOCK_BYTES):
            yield block


def _separator(head: str) -> str:
    """Return the separator that divides the first line of a table; a comma if several do."""
    line = next((line for line in head.lstrip("\ufeff").splitlines() if line.strip()), "")
    for separator in _SEPARATORS:
        try:
            if len(next(csv.reader([line], delimiter=separator), [])) > 1:
                return separator
        except csv.Error:
            continue
    return ","
