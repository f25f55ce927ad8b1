"""Read the file of --mlx_config: keys of mlx-lm's trainer, and settings that only the MLX engine has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.config.peer_names import DIFFERENT
from crosstune.core.errors import UserError, raise_all, shown
from crosstune.files.json_fields import FLAG, Rule, real
from crosstune.files.yaml_files import read_yaml

SECTION = "lora_parameters"
"""The section of adapter settings in a file of mlx-lm."""
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
_RULES = {
    "wired_limit_gb": real(0),
    "cache_limit_gb": real(0),
    "memory_limit_gb": real(0),
    "compile": FLAG,
    "num_layers": Rule(
        "1 or more, or -1 for all", lambda value: type(value) is int and (value > 0 or value == -1)
    ),
}


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


def read_mlx_settings(file: str | None) -> MlxSettings:
    if file is None:
        return MlxSettings()
    data = read_settings(file)
    raise_all(wrong_settings(data, file))
    return MlxSettings(**{key: value for key, value in data.items() if key in _RULES})


def read_settings(file: str | None) -> dict[str, Any]:
    """Return all settings in the file, flattened. JSON is read as YAML. Null values are left out: mlx-lm writes null for
    settings that are not set."""
    if file is None:
        return {}
    path = Path(file).expanduser()
    try:
        data = read_yaml(path)
    except UserError as error:
        raise UserError(
            f"Cannot read the file of --mlx_config, {path}.", why=error.why, do=error.do
        ) from error
    if not isinstance(data, dict):
        raise UserError(f"{path} has no settings.", why="it must consist of `key: value` lines.")
    inner = {} if data.get(SECTION) is None else data[SECTION]
    if not isinstance(inner, dict):
        raise UserError(
            f"{SECTION} cannot be {shown(inner)} ({path}).", do="it takes `key: value` lines, such as rank: 8"
        )
    both = {**{key: value for key, value in data.items() if key != SECTION}, **inner}
    return {str(key): value for key, value in both.items() if value is not None}


def options_in(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are names of options, here or in other trainers, as far as they are known."""
    return {key: value for key, value in data.items() if key not in (*_IDLE, *_RULES, "scale")}


def idle_settings(data: Mapping[str, Any], *, without_metal: bool) -> list[str]:
    """Return a warning for each kind of setting without effect: keys of mlx-lm's trainer, and keys that need Metal."""
    found = [f"{key} ({instead})" for key, instead in _IDLE.items() if key in data]
    warnings = [f"has no effect here: {', '.join(found)}"] if found else []
    if "wired_limit_gb" in data and without_metal:
        warnings.append("wired_limit_gb has no effect without Metal")
    return warnings


def wrong_settings(data: Mapping[str, Any], file: str) -> list[UserError]:
    """Return a problem for each setting of the MLX engine with a wrong value, and for settings of its optimizer."""
    found = [
        UserError(f"{key} cannot be {shown(data[key])} ({file}).", do=f"it takes {rule.needs}")
        for key, rule in _RULES.items()
        if key in data and not rule.fits(data[key])
    ]
    settings = data.get("optimizer_config")
    if settings.get(data.get("optimizer", "adam")) if isinstance(settings, dict) else settings:
        found.append(
            UserError(
                f"optimizer_config is not read from {file}.",
                why="the training would differ without it.",
                do="use --wd for weight_decay; the other optimizer settings are fixed",
            )
        )
    return found


def alpha_for_scale(data: Mapping[str, Any], options: Mapping[str, Any], file: str) -> float:
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
