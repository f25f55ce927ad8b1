"""Convert a value from a flag, a file, the environment or Python to the type of its option."""

from __future__ import annotations

import datetime
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crosstune.config.option import Option, StringKind
from crosstune.core.errors import UserError, shown
from crosstune.core.names import did_you_mean
from crosstune.core.safe_text import holds_secret
from crosstune.files.plain_files import read_plain_text

_TRUE = {"true", "yes", "on", "1", "y", "t"}
_FALSE = {"false", "no", "off", "0", "n", "f"}
_INTEGER = re.compile(r"[+-]?[0-9]{1,30}(_[0-9]{1,30})*")
LONGEST_PART_BYTES = 255
"""The longest name of a file or folder."""


def convert_value(option: Option, raw: Any, source: str) -> Any:
    """Return the value in the option's type; raise a UserError if it is invalid."""
    if raw is None or (option.optional and isinstance(raw, str) and raw.lower() in ("none", "null")):
        if option.optional:
            return None
        raise _refused(option, raw, source)
    if option.auto is not None and isinstance(raw, str) and raw.strip().lower() == "auto":
        return option.auto
    value = _convert(option, raw, source)
    choices = option.choices
    if choices is not None and value not in choices:
        known = option.instead.get(str(value).lower())
        hint = f"use {known}. " if known else did_you_mean(str(value), choices)
        raise _refused(option, value, source, do=f"{hint}Choices: {', '.join(choices)}.")
    if option.high is not None and not option.low <= value <= option.high:
        rounded = isinstance(raw, str) and option.type is int and not _INTEGER.fullmatch(raw.strip())
        raise _refused(option, raw if rounded else value, source)
    if option.check is not None and (accepted := option.check(value)) is not None:
        raise _refused(option, value, source, do=f"expected {accepted}")
    return value


def accepted_values(option: Option) -> str:
    """Describe the values of an option."""
    expected = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[option.type]
    if option.choices:
        expected = f"one of {', '.join(option.choices)}"
    if option.high is not None:
        expected += f" from {option.low:g} to {_number(option.high)}"
    return expected + (", or auto" if option.auto is not None else "")


def _convert(option: Option, raw: Any, source: str) -> Any:
    if option.type is str:
        return _to_string(option, raw, source)
    try:
        return {bool: _to_bool, int: _to_int, float: _to_float}[option.type](raw)
    except (ValueError, OverflowError):
        raise _refused(option, raw, source) from None


def _to_bool(raw: Any) -> bool:
    text = str(raw).strip().lower() if isinstance(raw, (str, bool)) or raw in (0, 1) else ""
    if text not in _TRUE | _FALSE:
        raise ValueError("not a truth value")
    return text in _TRUE


def _to_string(option: Option, raw: Any, source: str) -> str:
    if option.reads_lines and isinstance(raw, str):
        raw = _read_lines(option, raw, source)
    if option.joins_items is not None and isinstance(raw, (dict, list, tuple)):
        raw = _join(option, raw, source)
    if isinstance(raw, bool):
        word = "true, yes or on" if raw else "false, no or off"
        raise _refused(option, raw, source, do=f"put quotes around the word: YAML reads {word} as a boolean")
    if not _is_plain(raw) and not isinstance(raw, (datetime.date, os.PathLike)):
        raise _refused(option, raw, source)
    text = str(raw)
    if (wrong := _wrong_text(option, text)) is not None:
        raise _refused(option, text, source, do=wrong)
    return text


def _read_lines(option: Option, raw: str, source: str) -> str | list[str]:
    """Return the lines of a .txt file, or the value itself if it is a list."""
    if not raw.endswith(".txt") or "," in raw or wrong_path(raw) is not None:
        return raw
    path = Path(raw).expanduser()
    lines = [line.strip() for line in read_plain_text(path, limit=option.longest).splitlines()]
    if with_comma := [line for line in lines if "," in line]:
        raise _refused(option, with_comma[0], f"in {path}", do="remove the comma: it separates items")
    return [line for line in lines if line]


def _join(option: Option, raw: Mapping[Any, Any] | Sequence[Any], source: str) -> str:
    """Write a list as `a,b`, and a mapping or a list of one-item mappings as `a:1,b:2`."""
    pieces = []
    for item in raw.items() if isinstance(raw, Mapping) else raw:
        pair = next(iter(item.items())) if isinstance(item, Mapping) and len(item) == 1 else item
        if isinstance(pair, tuple) and len(pair) == 2 and option.joins_items and _is_plain(*pair):
            pieces.append(f"{pair[0]}{option.joins_items}{pair[1]}")
        elif _is_plain(pair):
            pieces.append(str(pair))
        else:
            raise _refused(option, raw, source)
    if not pieces:
        raise _refused(option, raw, source)
    return ",".join(pieces)


def _is_plain(*items: Any) -> bool:
    """True for strings and numbers, except for huge integers."""
    return all(
        isinstance(item, (str, float)) or (type(item) is int and item.bit_length() <= 64) for item in items
    )


def _wrong_text(option: Option, text: str) -> str | None:
    """Return advice for a string that is invalid for every option of this kind, otherwise None."""
    if not text.strip() and option.default != "":
        return "pass a value, or remove the option"
    if len(text) > option.longest:
        return f"use at most {option.longest:,} characters"
    if any(0xD800 <= ord(char) <= 0xDFFF for char in text):
        return "use UTF-8 text; rename a file whose name is not"
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        return "remove the control characters"
    if holds_secret(text):
        return (
            "remove the password or token, which the run would write to its files; log in with `hf auth login`, or set "
            "HF_TOKEN in the environment"
        )
    return wrong_path(text) if option.holds is StringKind.PATH else None


def wrong_path(text: str) -> str | None:
    """Return advice for text that cannot be a path on any machine, otherwise None."""
    if any(len(part.encode()) > LONGEST_PART_BYTES for part in text.split("/")):
        return f"use at most {LONGEST_PART_BYTES} bytes for each name in a path"
    if text.startswith("~"):
        try:
            Path(text).expanduser()
        except RuntimeError:  # no such account, or no HOME
            return "write the full path: the home folder of ~ is unknown"
    return None


def _to_int(raw: Any) -> int:
    """Parse an integer, including 1e3, without rounding large integers through a float."""
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and _INTEGER.fullmatch(raw.strip()):
        return int(raw)
    number = _to_float(raw)
    if number != int(number):
        raise ValueError("not whole")
    return int(number)


def _to_float(raw: Any) -> float:
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        raise ValueError("not a number")
    number = float(raw)
    if not math.isfinite(number) or (isinstance(raw, str) and not raw.isascii()):
        raise ValueError("not finite, or digits of another script")
    return number


def _refused(option: Option, raw: Any, source: str, *, do: str = "") -> UserError:
    return UserError(
        f"{option.name} cannot be {shown(raw)} ({source}).", do=do or f"expected {accepted_values(option)}"
    )


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
