"""Put errors into the words of a Python program: keywords instead of flags, arguments instead of files in the cache."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from crosstune.config.option import Option
from crosstune.config.schema import options_by_name
from crosstune.core.errors import ConfigError, UserError

_COMMAND = (
    r"`[^`]*`|\b(?:crosstune (?=[a-z])|pip install|hf |mlx_lm\.|mlx\.launch|torchrun|python )[^`;,)\n]*"
)
"""A command to run in a shell, whose flags stay as they are."""
_FLAG = re.compile(rf"(?P<command>{_COMMAND})|--(?P<name>[a-z][a-z0-9_]*)(?:(?: |=)(?P<value>[^\s;)`]+))?")
_TRUE, _FALSE = ("true", "yes"), ("false", "no")
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*(/\S*)?|[\"'].*")
_NUMBER = re.compile(r"-?\d[\d_]*(\.\d*)?(e-?\d+)?")
_RESULT_VALUES = ("dequantized", "original", "hf", "mlx", "gguf", "f16", "f32", "bf16")
"""Values of the arguments of `Model.merge` and `Model.export`, which are no options of a training."""

Written = dict[str, str]
"""Path of a file that was written for an argument -> the argument."""


@contextlib.contextmanager
def python_words(written: Mapping[str, str] | None = None) -> Iterator[None]:
    """Put the errors raised in the block into the words of a Python program."""
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
    error.asked, error.why, error.do = (
        _keywords(_arguments(text, written)) for text in (error.asked, error.why, error.do)
    )


def _arguments(text: str, written: Mapping[str, str]) -> str:
    """Name the argument instead of the file that its rows were written to, and a row instead of a line."""
    for path, argument in written.items():
        text = re.sub(rf"{re.escape(path)}/(\w+)\.jsonl", rf'{argument}["\1"]', text)
        text = text.replace(path, argument)
        text = re.sub(rf'({argument}(?:\["\w+"\])?), line (\d+)', r"\1, row \2", text)
    return text


def _keywords(text: str) -> str:
    """Write each flag in a text as a keyword argument, with its value if one follows."""
    return _FLAG.sub(_keyword, text)


def _keyword(found: re.Match[str]) -> str:
    if found["command"]:
        return str(found[0])
    name, word = found["name"], found["value"] or ""
    rest = found[0][2 + len(name) :]
    value = word.rstrip(",.:")
    option = options_by_name().get(name)
    if option is not None and option.type is bool:
        spelled = value.lower() in (*_TRUE, *_FALSE)
        return f"{name}={value.lower() not in _FALSE}" + (word[len(value) :] if spelled else rest)
    written = _literal(option, value)
    return f"{name}={rest}" if written is None else f"{name}={written}{word[len(value) :]}"


def _literal(option: Option | None, word: str) -> str | None:
    """Return a word after a flag as Python writes the value; None if it is no value but a word of the sentence."""
    if _PLACEHOLDER.fullmatch(word) or (
        _NUMBER.fullmatch(word) and (option is None or option.type is not str)
    ):
        return word
    choices = option.choices or () if option is not None else _RESULT_VALUES
    is_value = word in (*choices, "auto") or "=" in word or "/" in word
    return f'"{word}"' if is_value else None
