"""The file behind --mlx_config: keys as mlx-lm's own trainer spells them, read as ordinary options where there is
one, and the few settings that only the MLX engine has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from crosstune.config.schema import options_by_name
from crosstune.core.errors import UserError, raise_all
from crosstune.core.names import nearest

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
    "save_every": "save_steps",
    "rank": "lora_rank",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "keys": "lora_target_modules",
}
_LORA = "lora_parameters"


@dataclass(frozen=True, kw_only=True)
class MlxSettings:
    """What no option says."""

    wired_limit_gb: float | None = None
    """Memory that the system may not move away from the GPU."""
    cache_limit_gb: float | None = None
    """Freed memory that MLX keeps for its next arrays."""
    memory_limit_gb: float | None = None
    """What MLX tries to stay under."""
    compile: bool | None = None
    """Whether steps are compiled; unset, on a GPU."""
    num_layers: int | None = None
    """How many layers get adapters, the last ones of the model; -1 for all."""


_OWN = {item.name for item in fields(MlxSettings)}


def read_mlx_settings(file: str | None) -> MlxSettings:
    if file is None:
        return MlxSettings()
    data, problems = _read(Path(file).expanduser())
    values = {key: value for key, value in data.items() if key in _OWN}
    raise_all(problems + _wrong_values(values, file))
    if values.get("num_layers") is not None:
        values["num_layers"] = int(values["num_layers"])
    return MlxSettings(**values)


def _wrong_values(values: Mapping[str, Any], file: str) -> list[UserError]:
    found: list[UserError] = []
    for key, value in values.items():
        wants_bool = key == "compile"
        takes = ""
        if value is None:
            continue
        if isinstance(value, bool) != wants_bool or not isinstance(value, (bool, int, float)):
            takes = "true or false" if wants_bool else "a number"
        elif not math.isfinite(value):
            takes = "a number that is finite"
        elif key == "num_layers" and (value != int(value) or value < -1 or value == 0):
            takes = "a count from 1 up, or -1 for all"
        elif value < 0 and key != "num_layers":
            takes = "0 or more gigabytes"
        if takes:
            found.append(UserError(f"{key} cannot be {value!r} ({file}).", do=f"it takes {takes}"))
    return found


def options_in(file: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[UserError]]:
    """The ordinary options that the file sets, by their own names, and everything that is wrong with the file. What is
    `given` elsewhere comes before it."""
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
    return options, problems + _wrong_values({key: data[key] for key in data if key in _OWN}, file)


def _alpha(file: str, data: Mapping[str, Any], options: Mapping[str, Any]) -> float:
    """mlx-lm multiplies by `scale`, everyone else by alpha / rank, or by alpha / the root of rank."""
    rank, scale = _number(options.get("lora_rank")), _number(data["scale"])
    if rank is None or scale is None or "alpha" in data:
        raise UserError(
            f"scale cannot be read from {file}.",
            why="it stands for alpha / rank, so it needs a rank beside it and no alpha.",
            do="give rank and scale, or rank and alpha, as numbers",
        )
    return scale * (math.sqrt(rank) if str(options.get("use_rslora", False)).lower() == "true" else rank)


def _number(value: Any) -> float | None:
    """Flags are still words here."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def _read(path: Path) -> tuple[dict[str, Any], list[UserError]]:
    """The file as one flat list of keys, and what is wrong with those; JSON is YAML too."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Cannot read the file of --mlx_config, {path}.", why=str(error)) from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is neither JSON nor YAML.", why=" ".join(str(error).split())) from error
    inner = data.get(_LORA, {}) if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(inner, dict):
        raise UserError(f"{path} holds no settings.", why="it must be a list of `key: value` lines.")
    flat = {str(key): value for key, value in data.items() if key != _LORA} | inner
    known = {*_OPTION_OF, *_OWN, *options_by_name(), "scale", "mask_prompt", _LORA} - {"mlx_config"}
    return flat, [_unknown(key, known, path) for key in flat if key not in known]


def _unknown(key: str, known: set[str], path: Path) -> UserError:
    close = nearest(key, known)
    has = f"it has: {', '.join(sorted(_OWN))}, and options"
    return UserError(
        f"Unknown setting '{key}' in {path}.", do=f"did you mean {' or '.join(close)}?" if close else has
    )
