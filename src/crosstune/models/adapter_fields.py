"""Read the settings of an adapter folder, in the layout of PEFT or of mlx-lm, and check their types."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.core.json_fields import FLAG, NOTHING, OBJECT, TEXT, Rule, check_fields, list_of, real, whole
from crosstune.core.json_files import read_object
from crosstune.core.plain_files import MissingFile, check_regular_files

SETTINGS = "adapter_config.json"
_SWITCH = FLAG | NOTHING
_NUMBER = real(-1e30, 1e30)
_RANK = whole(1, 2**16)
_PEFT: Mapping[str, Rule] = {
    "peft_type": TEXT | NOTHING,
    "base_model_name_or_path": TEXT | NOTHING,
    "r": _RANK,
    "lora_alpha": _NUMBER,
    "lora_dropout": real(0, 1),
    "target_modules": TEXT | list_of(TEXT) | NOTHING,
    "target_parameters": list_of(TEXT) | NOTHING,
    "fan_in_fan_out": _SWITCH,
    "use_rslora": _SWITCH,
    "use_dora": _SWITCH,
    "bias": TEXT | NOTHING,
}
_MLX: Mapping[str, Rule] = {
    "fine_tune_type": TEXT,
    "num_layers": whole(-1, 2**20) | NOTHING,
    "model": TEXT | NOTHING,
    "lora_parameters": OBJECT,
    "peft": OBJECT | NOTHING,
}
_MLX_LORA: Mapping[str, Rule] = {
    "rank": _RANK,
    "scale": _NUMBER,
    "dropout": real(0, 1),
    "keys": list_of(TEXT) | NOTHING,
}
_LORA_NEEDS = ("r", "lora_alpha", "target_modules")


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the contents of adapter_config.json after checking the types of its fields."""
    path = folder / SETTINGS
    check_regular_files(folder)
    try:
        settings = read_object(path, foreign=True)
    except MissingFile as error:
        raise UserError(f"{folder} is not an adapter folder.", why=f"it has no {path.name}.") from error
    if "fine_tune_type" in settings or "lora_parameters" in settings:
        check_fields(settings, _MLX, required=("lora_parameters",), source=path)
        inner = settings["lora_parameters"]
        check_fields(inner, _MLX_LORA, required=("rank", "scale"), source=path, place="lora_parameters.")
        _check_peft(settings.get("peft") or {}, path, place="peft.")
    else:
        _check_peft(settings, path)
    return settings


def _check_peft(settings: Mapping[str, Any], path: Path, *, place: str = "") -> None:
    needs = _LORA_NEEDS if settings.get("peft_type") == "LORA" else ()
    check_fields(settings, _PEFT, required=needs, source=path, place=place)
