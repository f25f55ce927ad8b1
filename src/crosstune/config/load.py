"""Read a Config from flags, environment and file, in that order of precedence, and report all problems at once."""

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
from crosstune.core.yaml_files import read_yaml

_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}

Given = dict[str, tuple[Any, str]]
"""Option name -> (raw value, its source)."""


def load_config(
    flags: Sequence[str] = (), *, file: Path | None = None, environment: Mapping[str, str] | None = None
) -> Config:
    """Read a configuration; raise one ConfigError with all problems."""
    problems: list[UserError] = []
    given: Given = {}
    if file is not None:
        given.update(_read_file(file, problems))
    given.update(_read_environment(os.environ if environment is None else environment))
    given.update(_read_flags(flags, problems))
    return _build(given, problems)


def make_config(**values: Any) -> Config:
    """Make a configuration in Python: `make_config(model_name=..., lr=1e-4)`. Values are checked like flags."""
    problems: list[UserError] = []
    given: Given = {}
    for key, value in values.items():
        option = _find(key, f"argument {key}", problems)
        if option is not None:
            given[option.name] = (value, "argument")
    return _build(given, problems)


def cache_override(environment: Mapping[str, str] | None = None) -> Path | None:
    """Return the model cache folder set by CROSSTUNE_CACHE, if any."""
    value = (os.environ if environment is None else environment).get("CROSSTUNE_CACHE")
    return Path(value).expanduser() if value else None


def child_environment(added: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child process: that of this process, and the added variables."""
    return {**os.environ, **added}


def add_environment(spec: BackendSpec) -> None:
    """Set the environment variables of a backend, before its engine starts; keep those that the user set."""
    os.environ.update(spec.missing_environment(os.environ))


def environment_of(spec: BackendSpec, *, system: str | None = None) -> dict[str, str]:
    """Return the variables of a backend as a run from this shell would have them, on this system or on `system`."""
    full = {**os.environ, **spec.missing_environment(os.environ, system=system)}
    return {name: full[name] for name in spec.wanted_environment(system)}


def to_yaml(config: Config) -> str:
    """Return the options that were set, as YAML that `--config` reads."""
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
    """Add the options in the file of --mlx_config; everything else that was given wins over them."""
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
        data = read_yaml(path)
    except UserError as error:
        problems.append(UserError(f"Cannot read the configuration file {path}.", why=error.why, do=error.do))
        return {}
    if data is None:
        return {}
    if not isinstance(data, dict):
        problems.append(UserError(f"{path} has no options.", why="it must consist of `option: value` lines."))
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
    arguments = list(flags)
    while arguments:
        argument = arguments.pop(0)
        if not argument.startswith("--") or argument == "--":
            problems.append(
                UserError(f"Unexpected argument '{argument}'.", do="options look like --name value")
            )
            continue
        key, equals, text = argument[2:].partition("=")
        option = _find(key, f"flag --{key}", problems)
        next_is_value = bool(arguments) and not _is_flag(arguments[0])
        value: Any
        if equals:
            value = text
        elif option is None:
            value = arguments.pop(0) if next_is_value else None
        elif option.type is bool:
            is_given = next_is_value and arguments[0].lower() in _TRUE | _FALSE
            value = arguments.pop(0) if is_given else True
        elif next_is_value:
            value = arguments.pop(0)
        else:
            problems.append(UserError(f"--{key} needs a value.", do=_expectation(option)))
            continue
        if option is None:
            continue
        if option.name in given and given[option.name][1] != f"flag --{key}":
            problems.append(
                UserError(f"--{key} and {given[option.name][1]} are the same option.", do="keep one of them")
            )
        given[option.name] = (value, f"flag --{key}")
    return given


def _is_flag(argument: str) -> bool:
    return argument.startswith("--")


def _find(key: str, where: str, problems: list[UserError]) -> Option | None:
    names = options_by_name()
    option = names.get(key.replace("-", "_"))
    if option is None:
        close = nearest(key.replace("-", "_"), names)
        do = f"did you mean {' or '.join(close)}?" if close else "see: crosstune train --help"
        problems.append(UserError(f"Unknown option: {where}.", do=do))
    return option


def _coerce(option: Option, raw: Any, source: str) -> Any:
    """Return the value in the option's type; raise a UserError when it has another type or is out of range."""
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
        text = str(raw).lower()
        if text in _TRUE | _FALSE:
            return text in _TRUE
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
    """Parse an integer, also one written as 1e3, without rounding large ones through a float."""
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
    expected = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[option.type]
    if option.choices:
        expected = f"one of {', '.join(option.choices)}"
    if option.low is not None:
        expected += f", {option.low:g} or more"
    if option.high is not None:
        expected += f", at most {option.high}"
    return f"it takes {expected}"
