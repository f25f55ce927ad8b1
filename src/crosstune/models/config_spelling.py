"""config.json with its settings of positions spelled for every reader: transformers 5, transformers 4 and mlx-lm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crosstune.core.record import write_json
from crosstune.models.canonical import CONFIG
from crosstune.models.folder import read_config


def spell_positions(config: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters` alone; a reader of the older names would silently take defaults."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return config
    older: dict[str, Any] = {"rope_theta": rope["rope_theta"]}
    if rope.get("rope_type", "default") != "default":
        older["rope_scaling"] = rope
    return {**older, **config}


def respell_folder(folder: Path) -> None:
    write_json(folder / CONFIG, spell_positions(read_config(folder)))
