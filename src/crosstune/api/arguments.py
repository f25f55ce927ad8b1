"""Turn Python arguments into a configuration, and errors about flags into errors about arguments."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from crosstune.config.load import make_config
from crosstune.config.schema import Config, options_by_name
from crosstune.core.errors import ConfigError, UserError, raise_all
from crosstune.data.read.in_memory import write_in_memory
from crosstune.data.tokens.encode import cache_folder
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.files.atomic_files import put_in_place, staging_folder

_COMMAND = (
    r"`[^`]*`|\b(?:crosstune (?=[a-z])|pip install|hf |mlx_lm\.|mlx\.launch|torchrun|python )[^`;,)\n]*"
)
"""A shell command; its flags keep their dashes."""
_FLAG = re.compile(rf"(?P<command>{_COMMAND})|--(?P<name>[a-z][a-z0-9_]*)")

Written = dict[str, str]
"""File written for an in-memory argument -> the argument's name."""


@contextlib.contextmanager
def rephrase_errors(written: Mapping[str, str] | None = None) -> Iterator[None]:
    """Rephrase errors raised in the `with` block for a Python program."""
    try:
        yield
    except UserError as error:
        rephrase_error(error, written or {})
        raise


def rephrase_error(error: UserError, written: Mapping[str, str]) -> None:
    """Rephrase an error, and every problem in it, for a Python program."""
    if isinstance(error, ConfigError):
        for problem in error.problems:
            rephrase_error(problem, written)
    error.message, error.why, error.do = (
        _FLAG.sub(lambda found: found["command"] or found["name"], _arguments(text, written))
        for text in (error.message, error.why, error.do)
    )


def _arguments(text: str, written: Mapping[str, str]) -> str:
    """Replace the path of a written file with its argument, and its line numbers with row numbers."""
    for path, argument in written.items():
        text = re.sub(rf"{re.escape(path)}/(\w+)\.jsonl", rf'{argument}["\1"]', text)
        text = text.replace(path, argument)
        text = re.sub(rf'({argument}(?:\["\w+"\])?), line (\d+)', r"\1, row \2", text)
    return text


def reject_positional(function: str, given: Sequence[object]) -> None:
    """Raise a UserError for arguments without a name."""
    if given:
        first = repr(given[0]) if isinstance(given[0], str) else "..."
        raise UserError(
            f"{function} accepts keyword arguments only.",
            do=f"write the model as {function}(model_name={first}, ...), and the data as dataset=...",
        )


PathLike: TypeAlias = str | os.PathLike[str]
OptionValue: TypeAlias = str | int | float | bool | os.PathLike[str] | Sequence[str] | None
"""The value of an option; `crosstune options NAME` lists the accepted values."""


class Table(Protocol):
    """A `datasets.Dataset`."""

    @property
    def column_names(self) -> Any: ...

    def __len__(self) -> int: ...


class SavesTokenizer(Protocol):
    """A fast transformers tokenizer."""

    def save_pretrained(self, save_directory: str, /) -> Any: ...


Rows: TypeAlias = Sequence[Mapping[str, Any]] | Table
Data: TypeAlias = PathLike | Rows | Mapping[str, Rows]
"""A path, a name or a hub id; rows in memory; or split name -> rows."""


def read_config(
    options: Mapping[str, Any], *, written: Written | None = None, **objects: Data | SavesTokenizer | None
) -> Config:
    """Make a configuration from options and `objects`, options that may be in memory (None: not set).

    In-memory rows and tokenizers are written to the cache, once all names and values are valid; their paths are added to
    `written`.
    """
    values, in_memory = dict[str, Any](), dict[str, Any]()
    given = {name: value for name, value in objects.items() if value is not None}
    for name, value in (given | dict(options)).items():
        option = options_by_name().get(name)
        if isinstance(value, os.PathLike):
            values[name] = os.fspath(value)
        elif option is None or option.name not in _WRITERS or isinstance(value, str):
            values[name] = value
        else:
            in_memory[option.name] = value
    raise_all([problem for name, value in values.items() if (problem := _object_problem(name, value))])
    config = make_config(**values)
    if not in_memory:
        return config
    paths = {name: str(_WRITERS[name](value, name)) for name, value in in_memory.items()}
    if written is not None:
        written.update({path: name for name, path in paths.items()})
    return make_config(**values, **paths)


def _object_problem(name: str, value: Any) -> UserError | None:
    """Return the error for a model object passed instead of a model's name or folder."""
    option = options_by_name().get(name)
    is_model = option is not None and option.name in ("model_name", "base_adapter")
    if not is_model or isinstance(value, (str, int, float, type(None))):
        return None
    return UserError(
        f"{name} cannot be a {type(value).__qualname__} object.",
        why="a run reads weights from files, to record the model and to resume.",
        do=f'save model and tokenizer with save_pretrained("my-model"), and pass {name}="my-model"',
    )


def _write_data(data: object, option: str) -> Path:
    return write_in_memory(data, option=option)


def _write_tokenizer(tokenizer: Any, option: str) -> Path:
    """Save a transformers tokenizer to a cache folder named by its hash."""
    if not callable(getattr(tokenizer, "save_pretrained", None)):
        raise UserError(
            f"{option} cannot be a {type(tokenizer).__qualname__} object.",
            do="pass a fast transformers tokenizer, as returned by AutoTokenizer.from_pretrained, or a folder with its files",
        )
    root = cache_folder() / "tokenizers"
    root.mkdir(parents=True, exist_ok=True)
    with staging_folder(root / "tokenizer") as staging:
        saved = staging / "saved"
        tokenizer.save_pretrained(str(saved))
        if not (saved / "tokenizer.json").is_file():
            raise UserError(
                f"{option} cannot be a {type(tokenizer).__qualname__} object.",
                why="it is not a fast tokenizer: it lacks a tokenizer.json.",
                do="load it with AutoTokenizer.from_pretrained(..., use_fast=True)",
            )
        Tokenizer.from_folder(saved)
        digest = hashlib.sha256()
        for path in sorted(saved.rglob("*")):
            if path.is_file():
                digest.update(f"{path.relative_to(saved)}\0".encode() + path.read_bytes())
        target = root / digest.hexdigest()[:16]
        put_in_place(saved, target, aside=staging / "old")
    return target


_WRITERS: Mapping[str, Callable[[Any, str], Path]] = {
    "dataset": _write_data,
    "eval_dataset": _write_data,
    "tokenizer": _write_tokenizer,
}
"""Option that may be in memory -> function that writes the value and returns its path."""
