"""Read the --mlx_config file: keys of mlx-lm's trainer and settings of the MLX engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.config.schema import options_by_name
from crosstune.config.values import convert_value
from crosstune.core.errors import UserError, raise_all, shown
from crosstune.files.json_fields import FLAG, Rule, real
from crosstune.files.yaml_files import read_yaml

SECTION = "lora_parameters"
"""The section of adapter settings in an mlx-lm file."""
_IDLE = (
    *("train", "test", "test_batches", "val_batches", "adapter_path", "clear_cache_threshold"),
    *("optimizer_config", "trust_remote_code", "config"),
)
"""Keys of mlx-lm's trainer that crosstune does not use."""
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
    """Wired memory, never paged out."""
    cache_limit_gb: float | None = None
    """Freed memory kept for reuse."""
    memory_limit_gb: float | None = None
    """Soft limit of MLX's memory use."""
    compile: bool | None = None
    """Compile the steps; by default only on a GPU."""
    num_layers: int | None = None
    """Number of last layers with adapters; -1: all."""


def read_mlx_settings(file: str | None) -> MlxSettings:
    if file is None:
        return MlxSettings()
    data = read_settings(file)
    raise_all(wrong_settings(data, file))
    return MlxSettings(**{key: value for key, value in data.items() if key in _RULES})


def read_settings(file: str | None) -> dict[str, Any]:
    """Return all settings in a JSON or YAML file, flattened; omit null, which mlx-lm writes for settings that are not set."""
    if file is None:
        return {}
    path = Path(file).expanduser()
    try:
        data = read_yaml(path)
    except UserError as error:
        raise UserError(f"Cannot read the --mlx_config file {path}.", why=error.why, do=error.do) from error
    if not isinstance(data, dict):
        raise UserError(f"{path} contains no settings.", why="it must be a list of `key: value` lines.")
    inner = {} if data.get(SECTION) is None else data[SECTION]
    if not isinstance(inner, dict):
        raise UserError(
            f"{SECTION} cannot be {shown(inner)} ({path}).", do="expected `key: value` lines, such as rank: 8"
        )
    both = {**{key: value for key, value in data.items() if key != SECTION}, **inner}
    return {str(key): value for key, value in both.items() if value is not None}


def options_in(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings to read as options."""
    return {key: value for key, value in data.items() if key not in (*_IDLE, *_RULES, "scale")}


def unused_settings(data: Mapping[str, Any], *, without_metal: bool) -> list[str]:
    """Return warnings for settings without effect: keys of mlx-lm's trainer, and keys that need Metal."""
    found = [key for key in _IDLE if key in data]
    warnings = [f"has no effect in crosstune: {', '.join(found)}"] if found else []
    if "wired_limit_gb" in data and without_metal:
        warnings.append("wired_limit_gb has no effect without Metal")
    return warnings


def wrong_settings(data: Mapping[str, Any], file: str) -> list[UserError]:
    """Return a problem for each invalid setting of the MLX engine, and for optimizer settings."""
    found = [
        UserError(f"{key} cannot be {shown(data[key])} ({file}).", do=f"expected {rule.needs}")
        for key, rule in _RULES.items()
        if key in data and not rule.fits(data[key])
    ]
    settings = data.get("optimizer_config")
    if settings.get(data.get("optimizer", "adam")) if isinstance(settings, dict) else settings:
        found.append(
            UserError(
                f"optimizer_config is not read from {file}.",
                why="the results would differ without it.",
                do="use --wd for weight_decay, --adam_beta1 and --adam_beta2 for betas, and --adam_epsilon for eps",
            )
        )
    return found


def alpha_for_scale(data: Mapping[str, Any], options: Mapping[str, Any], file: str) -> float:
    """Return alpha for mlx-lm's `scale`: alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
    scale = data["scale"]
    if "lora_rank" not in options or "alpha" in data or not real().fits(scale):
        raise UserError(
            f"scale cannot be read from {file}.",
            why="it means alpha / rank, so it needs a rank and excludes alpha.",
            do="specify rank and scale, or rank and alpha, as numbers",
        )
    rank, by_root = (
        convert_value(options_by_name()[name], options.get(name, False), file)
        for name in ("lora_rank", "use_rslora")
    )
    return float(scale * (math.sqrt(rank) if by_root else rank))
