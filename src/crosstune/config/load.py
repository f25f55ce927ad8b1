"""From flags, environment and file to a Config. Flag > environment > file > default; all problems at once."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from crosstune.config.mlx_settings import options_in
from crosstune.config.option import Option
from crosstune.config.schema import Config, option_list, options_by_name
from crosstune.core.backend import BackendSpec
from crosstune.core.errors import UserError, raise_all
from crosstune.core.names import nearest

_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}

Given = dict[str, tuple[Any, str]]
"""Option name -> (raw value, where it came from)."""


def load_config(
    flags: Sequence[str] = (), *, file: Path | None = None, environment: Mapping[str, str] | None = None
) -> Config:
    """Read a configuration; raises one ConfigError that names every problem."""
    problems: list[UserError] = []
    given: Given = {}
    if file is not None:
        given.update(_read_file(file, problems))
    given.update(_read_environment(os.environ if environment is None else environment))
    given.update(_read_flags(flags, problems))
    return _build(given, problems)


def make_config(**values: Any) -> Config:
    """The Python way in: `make_config(model_name=..., lr=1e-4)`, checked like flags."""
    problems: list[UserError] = []
    given: Given = {}
    for key, value in values.items():
        option = _find(key, f"argument {key}", problems)
        if option is not None:
            given[option.name] = (value, "argument")
    return _build(given, problems)


def cache_override(environment: Mapping[str, str] | None = None) -> Path | None:
    """The folder for models that CROSSTUNE_CACHE names, if it does."""
    value = (os.environ if environment is None else environment).get("CROSSTUNE_CACHE")
    return Path(value).expanduser() if value else None


def child_environment(added: Mapping[str, str]) -> dict[str, str]:
    """What a process that is started from here finds: everything that is here, and what is added."""
    return {**os.environ, **added}


def add_environment(spec: BackendSpec) -> None:
    """Set variables that a backend's engine wants before it starts; what the user has set stays."""
    os.environ.update(spec.missing_environment(os.environ))


def environment_of(spec: BackendSpec, *, system: str | None = None) -> dict[str, str]:
    """The variables of a backend as a run from this shell would have them, here or on a machine with that system."""
    full = {**os.environ, **spec.missing_environment(os.environ, system=system)}
    return {name: full[name] for name in spec.wanted_environment(system)}


def to_yaml(config: Config) -> str:
    """The options that were asked, as a file that `--config` reads back."""
    return yaml.safe_dump(config.options_asked(), sort_keys=False, allow_unicode=True)


def _build(given: Given, problems: list[UserError]) -> Config:
    given = _add_mlx_settings(given, problems)
    values: dict[str, Any] = {}
    for name, (raw, source) in given.items():
        try:
            values[name] = _coerce(options_by_name()[name], raw, source)
        except UserError as error:
            problems.append(error)
    raise_all(problems)
    return Config(**values, asked={name: source for name, (_, source) in given.items()})


def _add_mlx_settings(given: Given, problems: list[UserError]) -> Given:
    """Options from the file of --mlx_config, beneath everything else that was given."""
    file = given.get("mlx_config", (None, ""))[0]
    if file is None:
        return given
    try:
        options, wrong = options_in(str(file), {name: raw for name, (raw, _) in given.items()})
    except UserError as error:
        problems.append(error)
        return given
    problems += wrong
    return {name: (value, str(file)) for name, value in options.items()} | given


def _read_file(path: Path, problems: list[UserError]) -> Given:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        problems.append(UserError(f"Cannot read the configuration file {path}.", why=str(error)))
        return {}
    except yaml.YAMLError as error:
        problems.append(UserError(f"{path} is not valid YAML.", why=" ".join(str(error).split())))
        return {}
    if data is None:
        return {}
    if not isinstance(data, dict):
        problems.append(
            UserError(f"{path} holds no options.", why="it must be a list of `option: value` lines.")
        )
        return {}
    given: Given = {}
    for key, value in data.items():
        option = _find(str(key), f"'{key}' in {path}", problems)
        if option is not None:
            given[option.name] = (value, str(path))
    return given


def _read_environment(environment: Mapping[str, str]) -> Given:
    return {
        option.name: (environment[option.env], option.env)
        for option in option_list()
        if option.env and environment.get(option.env)
    }


def _read_flags(flags: Sequence[str], problems: list[UserError]) -> Given:
    given: Given = {}
    words = list(flags)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            problems.append(UserError(f"Unexpected word '{word}'.", do="options look like --name value"))
            continue
        key, equals, text = word[2:].partition("=")
        option = _find(key, f"flag --{key}", problems)
        next_is_value = bool(words) and not _is_flag(words[0])
        value: Any
        if equals:
            value = text
        elif option is None:
            value = words.pop(0) if next_is_value else None
        elif option.type is bool:
            is_word = next_is_value and words[0].lower() in _TRUE | _FALSE
            value = words.pop(0) if is_word else True
        elif next_is_value:
            value = words.pop(0)
        else:
            problems.append(UserError(f"--{key} needs a value.", do=_expectation(option)))
            continue
        if option is None:
            continue
        if option.name in given and given[option.name][1] != f"flag --{key}":
            problems.append(
                UserError(f"--{key} and {given[option.name][1]} are the same option.", do="keep one")
            )
        given[option.name] = (value, f"flag --{key}")
    return given


def _is_flag(word: str) -> bool:
    return word.startswith("--")


def _find(key: str, where: str, problems: list[UserError]) -> Option | None:
    names = options_by_name()
    option = names.get(key.replace("-", "_"))
    if option is None:
        close = nearest(key.replace("-", "_"), names)
        do = f"did you mean {' or '.join(close)}?" if close else "see: crosstune train --help"
        problems.append(UserError(f"Unknown option: {where}.", do=do))
    return option


def _coerce(option: Option, raw: Any, source: str) -> Any:
    """The value in the option's type and range, or a UserError."""
    if raw is None or (option.optional and isinstance(raw, str) and raw.lower() in ("none", "null")):
        if option.optional:
            return None
        raise _bad_value(option, raw, source)
    value = _convert(option, raw, source)
    choices = option.choices
    if choices is not None and value not in choices:
        close = nearest(str(value), choices)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise UserError(
            f"{option.name} cannot be '{value}' ({source}).", do=f"{hint}It is one of: {', '.join(choices)}."
        )
    if (option.low is not None and value < option.low) or (option.high is not None and value > option.high):
        raise UserError(f"{option.name} cannot be {value} ({source}).", do=_expectation(option))
    if option.name in ("world_size", "max_steps", "dataset_samples") and value == 0:
        raise UserError(f"{option.name} cannot be 0 ({source}).", do="use -1 for all, or a number from 1 up")
    return value


def _convert(option: Option, raw: Any, source: str) -> Any:
    if option.type is bool:
        if isinstance(raw, bool):
            return raw
        word = str(raw).lower()
        if word in _TRUE | _FALSE:
            return word in _TRUE
        raise _bad_value(option, raw, source)
    if option.type is str:
        if isinstance(raw, (list, tuple)) and option.name == "lora_target_modules":
            return ",".join(str(item) for item in raw)
        if isinstance(raw, (dict, list, tuple)):
            raise _bad_value(option, raw, source)
        return str(raw)
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        raise _bad_value(option, raw, source)
    try:
        return _exact_int(raw) if option.type is int else _finite_float(raw)
    except ValueError:
        raise _bad_value(option, raw, source) from None


def _exact_int(raw: int | float | str) -> int:
    """A whole number, also when it is written as 1e3; never rounded through a float."""
    if isinstance(raw, str):
        try:
            return int(raw)
        except ValueError:
            pass
    number = _finite_float(raw)
    if number != int(number):
        raise ValueError("not whole")
    return raw if isinstance(raw, int) else int(number)


def _finite_float(raw: int | float | str) -> float:
    number = float(raw)
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number


def _bad_value(option: Option, raw: Any, source: str) -> UserError:
    return UserError(f"{option.name} cannot be {raw!r} ({source}).", do=_expectation(option))


def _expectation(option: Option) -> str:
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}[option.type]
    if option.choices:
        words = f"one of {', '.join(option.choices)}"
    if option.low is not None:
        words += f", {option.low:g} or more"
    if option.high is not None:
        words += f", at most {option.high}"
    return f"it takes {words}"
