"""Read the file of --mlx_config: keys of mlx-lm's trainer, mapped to options where there is one, and settings that only
the MLX engine has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from crosstune.config.option_names import find_option
from crosstune.config.peer_names import DIFFERENT, LORA_NAMES, SAME, SAME_FOR_VALUES
from crosstune.config.schema import options_by_name
from crosstune.core.errors import UserError, raise_all, shown
from crosstune.core.names import did_you_mean
from crosstune.core.yaml_files import read_yaml

_LORA = "lora_parameters"
_IDLE = {
    name: DIFFERENT[name]
    for name in (
        "train",
        "test",
        "test_batches",
        "val_batches",
        "adapter_path",
        "clear_cache_threshold",
        "optimizer_config",
        "trust_remote_code",
    )
} | {"config": "this file"}
"""Keys of mlx-lm's trainer that have no effect here -> what to use instead."""
_REFUSED = {name: DIFFERENT[name] for name in ("resume_adapter_file", "lr_schedule")}
"""Keys that would change the training if they were ignored -> the options to use instead."""
_OWN = {*_IDLE, *_REFUSED, "scale", _LORA, "mlx_config"}


@dataclass(frozen=True, kw_only=True)
class MlxSettings:
    """Settings of the MLX engine that are not options."""

    wired_limit_gb: float | None = None
    """Memory that stays wired, so that the system does not page it out."""
    cache_limit_gb: float | None = None
    """Freed memory that MLX keeps for reuse."""
    memory_limit_gb: float | None = None
    """The memory use that MLX tries to stay below."""
    compile: bool | None = None
    """True to compile the steps; by default on a GPU only."""
    num_layers: int | None = None
    """Number of layers, from the last, that get adapters; -1 for all."""


_MLX_ONLY = {item.name for item in fields(MlxSettings)}


def read_mlx_settings(file: str | None) -> MlxSettings:
    if file is None:
        return MlxSettings()
    data, problems = _read(Path(file).expanduser())
    values = {key: value for key, value in data.items() if key in _MLX_ONLY}
    raise_all(problems + _wrong_values(values, file))
    if values.get("num_layers") is not None:
        values["num_layers"] = int(values["num_layers"])
    return MlxSettings(**values)


def read_settings(file: str | None) -> dict[str, Any]:
    """Return all settings in the file, flattened."""
    return _read(Path(file).expanduser())[0] if file is not None else {}


def idle_settings(data: Mapping[str, Any], *, without_metal: bool) -> list[str]:
    """Return a warning for each kind of setting without effect: keys of mlx-lm's trainer, and those that need Metal."""
    found = [f"{key} ({instead})" for key, instead in _IDLE.items() if key in data]
    warnings = [f"has no effect here: {', '.join(found)}"] if found else []
    if "wired_limit_gb" in data and without_metal:
        warnings.append("wired_limit_gb has no effect without Metal")
    return warnings


def _refused(data: Mapping[str, Any], file: Path) -> list[UserError]:
    instead = {key: option for key, option in _REFUSED.items() if key in data}
    settings = data.get("optimizer_config")
    chosen = settings.get(data.get("optimizer", "adam")) if isinstance(settings, dict) else settings
    if chosen:
        instead["optimizer_config"] = "--wd for weight_decay; the other optimizer settings are fixed"
    return [
        UserError(
            f"{key} is not read from {file}.",
            why="the training would differ without it.",
            do=f"use {option}",
        )
        for key, option in instead.items()
    ]


def _option_names() -> set[str]:
    """Return the names of options, with those of other trainers."""
    return {*SAME, *SAME_FOR_VALUES, *DIFFERENT, *LORA_NAMES, *options_by_name()} - _MLX_ONLY - _OWN


def _wrong_values(values: Mapping[str, Any], file: str) -> list[UserError]:
    found: list[UserError] = []
    for key, value in values.items():
        takes_bool = key == "compile"
        takes = ""
        if value is None:
            continue
        if isinstance(value, bool) != takes_bool or not isinstance(value, (bool, int, float)):
            takes = "true or false" if takes_bool else "a number"
        elif not takes_bool and _number(value) is None:
            takes = "a finite number"
        elif key == "num_layers" and (value != int(value) or value < -1 or value == 0):
            takes = "1 or more, or -1 for all"
        elif value < 0 and key != "num_layers":
            takes = "0 or more gigabytes"
        if takes:
            found.append(UserError(f"{key} cannot be {shown(value)} ({file}).", do=f"it takes {takes}"))
    return found


def options_in(file: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[UserError]]:
    """Return the options that the file sets, under their names here, and the problems of the file. Options `given`
    elsewhere take precedence."""
    data, problems = _read(Path(file).expanduser())
    options: dict[str, Any] = {}
    for key in sorted(_option_names() & set(data), key=list(data).index):
        try:
            found = find_option(key, f"{key} in {file}", section=_LORA, raw=data[key])
            if found is not None:
                options[found.option.name] = found.value(data[key], file)
        except UserError as error:
            problems.append(error)
    if "scale" in data:
        try:
            options["lora_alpha"] = _alpha(file, data, {**options, **given})
        except UserError as error:
            problems.append(error)
    return options, problems + _wrong_values({key: data[key] for key in data if key in _MLX_ONLY}, file)


def _alpha(file: str, data: Mapping[str, Any], options: Mapping[str, Any]) -> float:
    """Return alpha for mlx-lm's `scale`, which is alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
    rank, scale = _number(options.get("lora_rank")), _number(data["scale"])
    if rank is None or rank < 1 or scale is None or "alpha" in data:
        raise UserError(
            f"scale cannot be read from {file}.",
            why="it stands for alpha / rank, so it needs a rank beside it and no alpha.",
            do="give rank and scale, or rank and alpha, as numbers",
        )
    return scale * (math.sqrt(rank) if str(options.get("use_rslora", False)).lower() == "true" else rank)


def _number(value: Any) -> float | None:
    """Convert a value that may still be a string from a flag; return None if it is not a finite number."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _read(path: Path) -> tuple[dict[str, Any], list[UserError]]:
    """Return the settings in the file, flattened, and their problems. JSON is read as YAML. Null values are left out:
    mlx-lm writes null for settings that are not set."""
    try:
        data = read_yaml(path)
    except UserError as error:
        raise UserError(
            f"Cannot read the file of --mlx_config, {path}.", why=error.why, do=error.do
        ) from error
    if not isinstance(data, dict):
        raise UserError(f"{path} has no settings.", why="it must consist of `key: value` lines.")
    inner = {} if data.get(_LORA) is None else data[_LORA]
    if not isinstance(inner, dict):
        raise UserError(
            f"{_LORA} cannot be {shown(inner)} ({path}).", do="it takes `key: value` lines, such as rank: 8"
        )
    both = {**{key: value for key, value in data.items() if key != _LORA}, **inner}
    flat = {str(key): value for key, value in both.items() if value is not None}
    known = _option_names() | _MLX_ONLY | _OWN - {"mlx_config"}
    unknown = [_unknown(key, known, path) for key in flat if key not in known]
    return flat, unknown + _refused(flat, path)


def _unknown(key: str, known: set[str], path: Path) -> UserError:
    has = f"it has: {', '.join(sorted(_MLX_ONLY))}, and options"
    return UserError(f"Unknown setting '{key}' in {path}.", do=did_you_mean(key, known).strip() or has)
