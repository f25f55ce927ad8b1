"""Write the RoPE and attention-window settings of config.json under the names that all readers know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crosstune.core.json_files import write_json
from crosstune.models.folder import read_config_json
from crosstune.models.llama_layout import CONFIG


def spell_positions(config: dict[str, Any]) -> dict[str, Any]:
    """Add the names of transformers 4 and mlx-lm to the `rope_parameters` of transformers 5, which alone would make
    other readers use defaults silently."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict):
        return config
    older: dict[str, Any] = {}
    local = rope.get("sliding_attention")
    if isinstance(local, dict) and "rope_theta" in local:
        older["rope_local_base_freq"] = local["rope_theta"]
    whole = rope.get("full_attention", rope)
    if isinstance(whole, dict) and "rope_theta" in whole:
        older["rope_theta"] = whole["rope_theta"]
        if whole.get("rope_type", "default") != "default":
            older["rope_scaling"] = whole
    return {**older, **_spell_windows(config), **config}


def _spell_windows(config: dict[str, Any]) -> dict[str, Any]:
    """Return the older `sliding_window_pattern` if every n-th layer has full attention."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or "full_attention" not in kinds or "sliding_attention" not in kinds:
        return {}
    every = kinds.index("full_attention") + 1
    regular = all(
        (kind == "full_attention") == ((place + 1) % every == 0) for place, kind in enumerate(kinds)
    )
    return {"sliding_window_pattern": every} if regular and every > 1 else {}


def respell_folder(folder: Path) -> None:
    write_json(folder / CONFIG, spell_positions(read_config_json(folder)))
