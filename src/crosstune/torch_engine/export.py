"""What was trained, as files that PEFT and transformers load as they are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from crosstune.core.errors import UserError
from crosstune.torch_engine.adapters import LoraLinear

PEFT_PREFIX = "base_model.model."
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def adapter_weights(adapters: Mapping[str, LoraLinear]) -> dict[str, nn.Parameter]:
    """Trained matrices by canonical name: the layer's name, then lora_A.weight or lora_B.weight."""
    named = {}
    for name, adapter in adapters.items():
        named[f"{name}.lora_A.weight"] = adapter.lora_A
        named[f"{name}.lora_B.weight"] = adapter.lora_B
    return named


def save_adapter(
    folder: Path,
    adapters: Mapping[str, LoraLinear],
    *,
    settings: Mapping[str, Any],
    base: Path,
    base_name: str | None = None,
) -> None:
    """A PEFT adapter folder, with the tokenizer beside it. `base_name` is the base's hub id, where it has one."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        PEFT_PREFIX + name: p.detach().cpu().contiguous() for name, p in adapter_weights(adapters).items()
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name or str(base),
        "inference_mode": True,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "r": settings["rank"],
        "lora_alpha": settings["alpha"],
        "lora_dropout": settings["dropout"],
        "target_modules": sorted(_suffixes(adapters)),
        "modules_to_save": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    copy_tokenizer(base, folder)


def _suffixes(adapters: Mapping[str, LoraLinear]) -> set[str]:
    return {name.rpartition(".")[2] for name in adapters}


def load_adapter(folder: Path, adapters: Mapping[str, LoraLinear]) -> None:
    """Copy the weights of a PEFT adapter folder into the model's adapters; every name and shape must fit."""
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        raise UserError(f"{folder} is not an adapter folder.", why=f"it has no {path.name}.")
    tensors = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in load_file(path).items()}
    wanted = adapter_weights(adapters)
    missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    wrong = [name for name in wanted.keys() & tensors.keys() if wanted[name].shape != tensors[name].shape]
    if missing or extra or wrong:
        parts = [
            f"{len(names)} {words}, such as {names[0]}"
            for names, words in (
                (missing, "matrices missing"),
                (extra, "too many"),
                (wrong, "of another shape"),
            )
            if names
        ]
        raise UserError(
            f"The adapter {folder} does not fit this model and its adapter options.",
            why="; ".join(parts) + ".",
            do="use the model, --lora_rank and --lora_target_modules it was trained with",
        )
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(tensors[name])


def save_model(folder: Path, model: nn.Module, *, base: Path) -> None:
    """A whole model folder."""
    model.save_pretrained(folder)
    copy_tokenizer(base, folder)


def copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy2(source / name, target / name)
