"""Word errors for a Python program: names instead of flags, arguments instead of files in the cache."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from crosstune.core.errors import ConfigError, UserError

_COMMAND = (
    r"`[^`]*`|\b(?:crosstune (?=[a-z])|pip install|hf |mlx_lm\.|mlx\.launch|torchrun|python )[^`;,)\n]*"
)
"""A command to run in a shell, whose flags stay as they are."""
_FLAG = re.compile(rf"(?P<command>{_COMMAND})|--(?P<name>[a-z][a-z0-9_]*)")

Written = dict[str, str]
"""Path of a file that was written for an argument -> the argument."""


@contextlib.contextmanager
def python_words(written: Mapping[str, str] | None = None) -> Iterator[None]:
    """Word the errors raised in the block for a Python program."""
    try:
        yield
    except UserError as error:
        put_into_python(error, written or {})
        raise


def put_into_python(error: UserError, written: Mapping[str, str]) -> None:
    """Change the words of an error, and of every problem in it."""
    if isinstance(error, ConfigError):
        for problem in error.problems:
            put_into_python(problem, written)
    error.message, error.why, error.do = (
        _FLAG.sub(lambda found: found["command"] or found["name"], _arguments(text, written))
        for text in (error.message, error.why, error.do)
    )


def _arguments(text: str, written: Mapping[str, str]) -> str:
    """Name the argument instead of the file that its rows were written to, and a row instead of a line."""
    for path, argument in written.items():
        text = re.sub(rf"{re.escape(path)}/(\w+)\.jsonl", rf'{argument}["\1"]', text)
        text = text.replace(path, argument)
        text = re.sub(rf'({argument}(?:\["\w+"\])?), line (\d+)', r"\1, row \2", text)
    return text
