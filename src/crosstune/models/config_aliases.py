"""Write config.json with the key names of all readers: RoPE, attention windows, experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crosstune.files.json_files import write_json
from crosstune.models.folder import read_config_json
from crosstune.models.llama_layout import CONFIG

_EXPERT_NAMES = ("num_experts", "num_local_experts")
_DERIVED_HEADS = ("qwen3_moe",)
"""Types whose head size is hidden_size / num_attention_heads unless it is given, and that mlx-lm reads only with it."""


def add_config_aliases(config: dict[str, Any]) -> dict[str, Any]:
    """Add the names that transformers 4 and mlx-lm read to the names of transformers 5. With the newer names alone, other
    readers fail or use defaults silently."""
    return {**_spell_positions(config), **_spell_windows(config), **_spell_sizes(config), **config}


def _spell_positions(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict):
        return {}
    older: dict[str, Any] = {}
    local = rope.get("sliding_attention")
    if isinstance(local, dict) and "rope_theta" in local:
        older["rope_local_base_freq"] = local["rope_theta"]
    whole = rope.get("full_attention", rope)
    if isinstance(whole, dict) and "rope_theta" in whole:
        older["rope_theta"] = whole["rope_theta"]
        if whole.get("rope_type", "default") != "default":
            older["rope_scaling"] = whole
        if "partial_rotary_factor" in whole:
            older["partial_rotary_factor"] = whole["partial_rotary_factor"]
        if config.get("model_type") == "gpt_neox":
            older["rotary_emb_base"] = whole["rope_theta"]
            older["rotary_pct"] = whole.get("partial_rotary_factor", 0.25)
    return older


def _spell_sizes(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    experts = next((config[name] for name in _EXPERT_NAMES if config.get(name) is not None), None)
    if experts is not None:
        found |= dict.fromkeys(_EXPERT_NAMES, experts)
    if config.get("model_type") in _DERIVED_HEADS and config.get("hidden_size"):
        found["head_dim"] = config["hidden_size"] // config.get("num_attention_heads", 1)
    if config.get("model_type") == "gpt2" and "n_positions" in config:
        found["n_ctx"] = config["n_positions"]
    return found


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


def add_folder_aliases(folder: Path) -> None:
    write_json(folder / CONFIG, add_config_aliases(read_config_json(folder)))
