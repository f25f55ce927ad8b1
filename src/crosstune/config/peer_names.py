"""Map other trainers' option names, listed in peer_names.yaml, to crosstune's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from crosstune.files.yaml_files import read_yaml

PREFERENCE_LOSSES = {
    "sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "robust": "robust", "nca_pair": "nca", "bco_pair": "bco",
    "sppo_hard": "sppo", "apo_zero": "apo_zero", "apo_down": "apo_down", "orpo": "orpo", "simpo": "simpo", "kto": "kto",
    "cpo": "cpo",
}  # fmt: skip

SAME_FOR_VALUES: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "mask_prompt": ("train_on_prompt", {"true": False, "false": True}, "--train_on_prompt"),
    "lora_target_linear": ("lora_target_modules", {"true": "all"}, "--lora_target_modules with the names"),
    **dict.fromkeys(
        ("finetuning_type", "fine_tune_type", "adapter"),
        (
            "train_type",
            {name: name for name in ("lora", "qlora", "dora", "full")},
            "--train_type; to train only a few layers, use llama_pro; to start from an adapter, --base_adapter FOLDER",
        ),
    ),
    "stage": (
        "head",
        {"rm": "scalar"},
        "--recipe; `crosstune judge train --head scalar` trains reward models",
    ),
    "reward_model": ("head", {"true": "scalar"}, "`crosstune judge train --head scalar`"),
}
"""Their name -> (option, their value -> our value, advice for any other value)."""

SAME_VALUES: Mapping[str, Mapping[str, str]] = {
    "optimizer": {
        "adamw_torch": "adamw",
        "adamw_hf": "adamw",
        "adamw_torch_fused": "fused_adamw",
        "adamw_bnb_8bit": "adamw_8bit",
        "lion_32bit": "lion",
        "lion_pytorch": "lion",
    },
    "lora_target_modules": {"all-linear": "all"},
    "resume": {"true": "auto", "false": "none"},
    "use_gradient_checkpointing": {"unsloth": "true"},
}
"""Option -> their value -> our value."""


@dataclass(frozen=True, kw_only=True)
class PeerNames:
    same: Mapping[str, str]
    """Their name -> option with the same meaning."""
    different: Mapping[str, str]
    """Their name -> the replacement."""
    off_by_default: frozenset[str]
    """Names to ignore if their value is false, 0 or empty."""
    sections: Mapping[str, Mapping[str, str]]
    """Section of a YAML file -> its short names of options."""


@cache
def peer_names() -> PeerNames:
    tables = read_yaml(Path(__file__).with_suffix(".yaml"))
    return PeerNames(
        same={name: option for option, names in tables["same"].items() for name in names.split()},
        different={name: do for names, do in tables["different"].items() for name in names.split()},
        off_by_default=frozenset(tables["off_by_default"].split()),
        sections={name: short for names, short in tables["sections"].items() for name in names.split()},
    )
