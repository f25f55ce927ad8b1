"""Read the file of --mlx_config: keys of mlx-lm's trainer, mapped to options where there is one, and settings that only
the MLX engine has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from crosstune.config.schema import options_by_name
from crosstune.core.errors import UserError, raise_all, shown
from crosstune.core.names import nearest
from crosstune.core.yaml_files import read_yaml

_OPTION_OF = {
    "model": "model_name",
    "data": "dataset",
    "fine_tune_type": "train_type",
    "learning_rate": "lr",
    "iters": "max_steps",
    "max_seq_length": "context_length",
    "grad_checkpoint": "use_gradient_checkpointing",
    "grad_accumulation_steps": "gradient_accumulation_steps",
    "steps_per_eval": "eval_steps",
    "steps_per_report": "log_every_n_steps",
    "save_every": "save_steps",
    "rank": "lora_rank",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "keys": "lora_target_modules",
}
_LORA = "lora_parameters"
_IDLE = {
    "train": "crosstune train always trains",
    "test": "--eval_dataset names held-out data",
    "test_batches": "--eval_samples",
    "val_batches": "--eval_samples",
    "adapter_path": "--output_dir and --name",
    "report_to": "--log_to",
    "clear_cache_threshold": "cache_limit_gb, or --low_memory",
    "optimizer_config": "--wd",
    "config": "this file",
    "trust_remote_code": "remote code is never run",
}
"""Keys of mlx-lm's trainer that have no effect here -> what to use instead."""
_REFUSED = {
    "resume_adapter_file": "--base_adapter FOLDER to start from an adapter (crosstune convert ADAPTER --to peft converts one "
    "of mlx-lm), or --resume to continue a run of crosstune",
    "lr_schedule": "--lr_scheduler with --warmup_steps and --cosine_min_lr_ratio",
}
"""Keys that would change the training if they were ignored -> the options to use instead."""


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
    """Whether steps are compiled; by default on a GPU only."""
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


def _wrong_values(values: Mapping[str, Any], file: str) -> list[UserError]:
    found: list[UserError] = []
    for key, value in values.items():
        takes_bool = key == "compile"
        takes = ""
        if value is None:
            continue
        if isinstance(value, bool) != takes_bool or not isinstance(value, (bool, int, float)):
            takes = "true or false" if takes_bool else "a number"
        elif not math.isfinite(value):
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
    for key, value in data.items():
        name = _OPTION_OF.get(key, key)
        known = options_by_name().get(name)
        if known is not None:
            options[known.name] = value
    if "scale" in data:
        try:
            options["lora_alpha"] = _alpha(file, data, {**options, **given})
        except UserError as error:
            problems.append(error)
    if "mask_prompt" in data:
        options["train_on_prompt"] = not data["mask_prompt"]
    return options, problems + _wrong_values({key: data[key] for key in data if key in _MLX_ONLY}, file)


def _alpha(file: str, data: Mapping[str, Any], options: Mapping[str, Any]) -> float:
    """Return alpha for mlx-lm's `scale`, which is alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
    rank, scale = _number(options.get("lora_rank")), _number(data["scale"])
    if rank is None or scale is None or "alpha" in data:
        raise UserError(
            f"scale cannot be read from {file}.",
            why="it stands for alpha / rank, so it needs a rank beside it and no alpha.",
            do="give rank and scale, or rank and alpha, as numbers",
        )
    return scale * (math.sqrt(rank) if str(options.get("use_rslora", False)).lower() == "true" else rank)


def _number(value: Any) -> float | None:
    """Convert a value that may still be a string from a flag."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


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
    known = {*_OPTION_OF, *_MLX_ONLY, *_IDLE, *_REFUSED, *options_by_name(), "scale", "mask_prompt", _LORA}
    unknown = [
        _unknown(key, known - {"mlx_config"}, path) for key in flat if key not in known - {"mlx_config"}
    ]
    return flat, unknown + _refused(flat, path)


def _unknown(key: str, known: set[str], path: Path) -> UserError:
    close = nearest(key, known)
    has = f"it has: {', '.join(sorted(_MLX_ONLY))}, and options"
    return UserError(
        f"Unknown setting '{key}' in {path}.", do=f"did you mean {' or '.join(close)}?" if close else has
    )
