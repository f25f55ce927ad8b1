"""Read a Config from flags, environment and file, in that order of precedence; read and set environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from crosstune.config.mlx_settings import SECTION, alpha_for_scale, options_in, read_settings, wrong_settings
from crosstune.config.mmdit_file import is_mmdit, translate
from crosstune.config.option_names import find_option
from crosstune.config.peer_names import peer_names
from crosstune.config.schema import Config, option_list, options_by_name
from crosstune.config.values import accepted_values, convert_value, wrong_path
from crosstune.core.backend import BackendSpec, backend_specs
from crosstune.core.errors import END_WITH_BACKSLASH, UserError, follows_backslash, raise_all, shown
from crosstune.files.paths import CACHE_VARIABLE, user_cache
from crosstune.files.yaml_files import read_yaml


@dataclass(frozen=True)
class Setting:
    """A value passed for an option."""

    raw: Any
    source: str
    where: str = ""
    """Name and source, for errors."""
    peers_name: str = ""
    """The other trainer's option name, if it was set under that name."""


Given = dict[str, Setting]
"""Option name -> given value."""


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
    """Make a configuration from keywords, such as `make_config(model_name=..., lr=1e-4)`, checked like flags."""
    problems: list[UserError] = []
    given: Given = {}
    for key, value in values.items():
        _add(given, problems, key=key, raw=value, where=f"argument {key}", source="argument")
    return _build(given, problems)


def cache_base() -> Path:
    """Return crosstune's cache folder: CROSSTUNE_CACHE, or the one in the user's cache folder."""
    value = os.environ.get(CACHE_VARIABLE)
    if not value:
        return user_cache()
    wrong = "use printable UTF-8 text" if not value.isprintable() else wrong_path(value)
    if wrong is not None:
        raise UserError(f"{CACHE_VARIABLE} cannot be {shown(value)}.", do=wrong)
    return Path(value).expanduser().absolute()


def reward_key() -> str:
    """Return the key of the reward server, which would be visible in an option."""
    return os.environ.get("CROSSTUNE_REWARD_KEY", "").strip()


def child_environment(added: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this process with added variables, for a child process."""
    return {**os.environ, **added}


def visible_devices(variable: str, *, count: int) -> list[str]:
    """Return the names of the devices that a variable such as CUDA_VISIBLE_DEVICES selects, by default 0, 1, ..."""
    names = [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]
    return names[:count] or [str(place) for place in range(count)]


def add_environment(spec: BackendSpec) -> None:
    """Set the environment variables of a backend before its engine starts; keep the user's values."""
    os.environ.update(spec.missing_environment(os.environ))


def add_variables(variables: Mapping[str, str], *, over: bool = False) -> list[str]:
    """Set environment variables and return their names; without `over`, keep existing ones."""
    added = {name: value for name, value in variables.items() if over or name not in os.environ}
    os.environ.update(added)
    return list(added)


def remove_variables(names: Iterable[str]) -> None:
    for name in names:
        os.environ.pop(name, None)


def launch_variables() -> Mapping[str, str]:
    """Return the environment variables of this process."""
    return os.environ


def backend_variables() -> dict[str, str]:
    """Return the backends' environment variables that are set."""
    names = {name for spec in backend_specs().values() for name in spec.wanted_environment()}
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


def environment_of(spec: BackendSpec, *, system: str | None = None) -> dict[str, str]:
    """Return a backend's variables for a run started from this shell, on this system or on `system`."""
    full = {**os.environ, **spec.missing_environment(os.environ, system=system)}
    return {name: full[name] for name in spec.wanted_environment(system)}


def to_yaml(config: Config) -> str:
    """Return the options set by the user as YAML for `--config`."""
    return yaml.safe_dump(config.options_asked(), sort_keys=False, allow_unicode=True)


def _build(given: Given, problems: list[UserError]) -> Config:
    given = _add_mlx_settings(given, problems)
    values: dict[str, Any] = {}
    for name, setting in given.items():
        try:
            values[name] = convert_value(options_by_name()[name], setting.raw, setting.source)
        except UserError as error:
            problems.append(error)
    counts_micro_batches = "max_steps" in given and given["max_steps"].peers_name == "iters"
    if counts_micro_batches and values.get("gradient_accumulation_steps", 1) != 1:
        problems.append(
            UserError(
                "iters cannot be combined with gradient_accumulation_steps.",
                why="iters counts micro-batches, and an optimizer step has more than one.",
                do="use --max_steps to count optimizer steps",
            )
        )
    raise_all(problems)
    return Config(
        **values,
        sources={name: setting.source for name, setting in given.items()},
        renamed={name: setting.peers_name for name, setting in given.items() if setting.peers_name},
    )


def _add_mlx_settings(given: Given, problems: list[UserError]) -> Given:
    """Add the options in the --mlx_config file; other sources override them."""
    if "mlx_config" not in given:
        return given
    setting, found = given["mlx_config"], Given()
    try:
        file = convert_value(options_by_name()["mlx_config"], setting.raw, setting.source)
        if file is None:
            return given
        data = read_settings(file)
        for key, raw in options_in(data).items():
            where = f"{shown(key)[1:-1]} in {file}"
            _add(found, problems, key=key, raw=raw, where=where, source=file, section=SECTION)
        problems += wrong_settings(data, file)
        if "scale" in data:
            known = {name: other.raw for name, other in (found | given).items()}
            found["lora_alpha"] = Setting(alpha_for_scale(data, known, file), file)
    except UserError as error:
        problems.append(error)
        del given["mlx_config"]
    return found | given


def _read_file(path: Path, problems: list[UserError]) -> Given:
    given: Given = {}
    try:
        data = read_yaml(path)
    except UserError as error:
        problems.append(UserError(f"Cannot read the configuration file {path}.", why=error.why, do=error.do))
        return given
    if data is not None and not isinstance(data, dict):
        problems.append(
            UserError(f"{path} contains no options.", why="it must be a list of `option: value` lines.")
        )
        return given
    if isinstance(data, dict) and is_mmdit(data):
        data = translate(data, path, problems)
    for section, key, raw in _flat(data or {}, path, problems):
        place = f"{section}.{key}" if section else key
        where = f"{shown(place)} in {path}"
        _add(given, problems, key=key, raw=raw, where=where, source=str(path), section=section)
    return given


def _flat(data: Mapping[Any, Any], path: Path, problems: list[UserError]) -> Iterator[tuple[str, str, Any]]:
    """Yield section (or ""), name and value of each option in a file."""
    for key, value in data.items():
        name = str(key) if isinstance(key, (str, int, float)) else shown(key)
        if not isinstance(value, dict) or _is_value(name, value):
            yield "", name, value
        elif name.replace("-", "_") not in peer_names().sections:
            problems.append(
                UserError(
                    f"{shown(name)} in {path} is not a section of options.",
                    do=f"write its options as `option: value` lines; known sections: {', '.join(peer_names().sections)}",
                )
            )
        else:
            yield from ((name.replace("-", "_"), str(inner)[:200], raw) for inner, raw in value.items())


def _is_value(name: str, value: Mapping[Any, Any]) -> bool:
    """True if a mapping is the value of an option, such as data sources with weights, and not a section."""
    names = options_by_name()
    option = names.get(name.replace("-", "_"))
    if option is None or not option.joins_items:
        return False
    return not any(str(inner).replace("-", "_") in names for inner in value)


def _read_environment(environment: Mapping[str, str]) -> Given:
    return {
        option.name: Setting(environment[option.env], option.env)
        for option in option_list()
        if option.env and environment.get(option.env)
    }


def _read_flags(flags: Sequence[str], problems: list[UserError]) -> Given:
    given: Given = {}
    arguments = list(flags)
    while arguments:
        argument = arguments.pop(0)
        if not argument.startswith("--") or argument == "--":
            do = END_WITH_BACKSLASH if follows_backslash(argument) else _flag_for(argument)
            problems.append(UserError(f"Unexpected argument {shown(argument)}.", do=do))
            continue
        key, equals, text = argument[2:].partition("=")
        value: str | None = text if equals else None
        if not (equals or not arguments or arguments[0].startswith("--") or follows_backslash(arguments[0])):
            value = arguments.pop(0)
        section, _, name = key.rpartition(".")
        flag = f"flag --{key}"
        _add(given, problems, key=name, raw=value, where=flag, source=flag, section=section, is_flag=True)
    return given


def _flag_for(argument: str) -> str:
    """Return the advice for an argument without a flag: the flag that its ending belongs to, or the form of all flags."""
    flags = {
        ".jsonl .json .csv .tsv .parquet .txt": "--dataset",
        ".yaml .yml": "--config",
        ".gguf": "--model_name",
    }
    for endings, flag in flags.items():
        if argument.lower().endswith(tuple(endings.split())):
            return f"did you mean {flag} {shown(argument)[1:-1]}?"
    return "options look like --name value"


def _add(
    given: Given,
    problems: list[UserError],
    *,
    key: str,
    raw: Any,
    where: str,
    source: str,
    section: str = "",
    is_flag: bool = False,
) -> None:
    """Add a value given under a name; a flag without a value is a switch."""
    is_bare = is_flag and raw is None
    try:
        if section not in ("", *peer_names().sections):
            raise UserError(f"Unknown option: {where}.", do=f"remove {shown(section)} and the dot")
        found = find_option(key, where, section=section, raw=True if is_bare else raw)
        if found is None:
            return
        if is_bare and not found.is_switch:
            raise UserError(f"--{key} needs a value.", do=f"expected {accepted_values(found.option)}")
        given_as, raw = raw, found.value(True if is_bare else raw, source)
    except UserError as error:
        problems.append(error)
        return
    name = found.option.name
    before = given.get(name)
    # The last of repeated flags wins, for scripts that append to a command.
    if before is not None and not (is_flag and before.source == source):
        problems.append(
            UserError(f"{name} is set twice: {where}, and {before.where}.", do="keep one of them")
        )
    translated = "" if raw is given_as or is_bare else f"{key} {given_as}"
    given[name] = Setting(raw, source, where, found.name if found.is_peers else translated)
