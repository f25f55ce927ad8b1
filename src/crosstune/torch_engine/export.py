"""What was trained, as files that PEFT and transformers load as they are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from crosstune.core.errors import UserError
from crosstune.models.config_spelling import respell_folder
from crosstune.models.folder import PLAIN_STEM
from crosstune.torch_engine.adapters import AdaptedLinear, AdapterSettings

PEFT_PREFIX = "base_model.model."
SHARD_BYTES = 4 * 2**30
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def adapter_weights(adapters: Mapping[str, AdaptedLinear]) -> dict[str, nn.Parameter]:
    """Trained tensors by canonical name: the layer's name, then lora_A.weight, lora_B.weight, lora_magnitude_vector."""
    return {
        f"{name}.{part}": p for name, adapter in adapters.items() for part, p in adapter.trained().items()
    }


def save_adapter(
    folder: Path,
    adapters: Mapping[str, AdaptedLinear],
    *,
    settings: AdapterSettings,
    targets: Sequence[str],
    base: Path,
    base_name: str | None = None,
    record: Mapping[str, Any],
) -> None:
    """A PEFT adapter folder, with the tokenizer beside it. `base_name` is the base's hub id, where it has one.

    `record` says over which weights, quantized how, it was trained; it goes into crosstune.json.
    """
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
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rank_stabilized,
        "use_dora": settings.magnitudes,
        "target_modules": list(targets),
        "modules_to_save": None,
    }
    _write_json(folder / "adapter_config.json", config)
    _write_json(folder / "crosstune.json", record)
    copy_tokenizer(base, folder)


def load_adapter(folder: Path, adapters: Mapping[str, AdaptedLinear], *, settings: AdapterSettings) -> None:
    """Copy the weights of a PEFT adapter folder into the model's adapters; settings, names and shapes must fit."""
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        raise UserError(f"{folder} is not an adapter folder.", why=f"it has no {path.name}.")
    _check_settings(folder, settings)
    tensors = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in load_file(path).items()}
    wanted = adapter_weights(adapters)
    missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    wrong = sorted(
        name for name in wanted.keys() & tensors.keys() if wanted[name].shape != tensors[name].shape
    )
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
            do="use the model, --train_type, --lora_rank and --lora_target_modules it was trained with",
        )
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(tensors[name])


def _check_settings(folder: Path, settings: AdapterSettings) -> None:
    """The same matrices with another scale are another adapter."""
    path = folder / "adapter_config.json"
    if not path.is_file():
        raise UserError(f"{folder} is not an adapter folder.", why=f"it has no {path.name}.")
    config = json.loads(path.read_text(encoding="utf-8"))
    unread = [name for name in ("rank_pattern", "alpha_pattern", "modules_to_save") if config.get(name)]
    if unread:
        raise UserError(
            f"The adapter {folder} uses {', '.join(unread)}.", why="crosstune has no such adapters."
        )
    pairs = {
        "lora_rank": (config["r"], settings.rank),
        "lora_alpha": (config["lora_alpha"], settings.alpha),
        "use_rslora": (bool(config.get("use_rslora")), settings.rank_stabilized),
        "dora": (bool(config.get("use_dora")), settings.magnitudes),
    }
    wrong = [
        f"{name} {theirs} there and {ours} here" for name, (theirs, ours) in pairs.items() if theirs != ours
    ]
    if wrong:
        raise UserError(
            f"The adapter {folder} does not fit the adapter options.",
            why="; ".join(wrong) + ".",
            do="ask for what it was trained with",
        )


def save_model(
    folder: Path,
    config: Any,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    base: Path,
    stem: str = PLAIN_STEM,
) -> None:
    """A whole model folder, in shards: never more than one shard of it is in memory beside the source.

    transformers looks for files named after `PLAIN_STEM`; another `stem` is for weights that it cannot read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        held[name] = tensor.detach().cpu().contiguous()
        if _num_bytes(held) >= SHARD_BYTES:
            shards.append(_write_shard(folder, held, len(shards)))
            held = {}
    if held:
        shards.append(_write_shard(folder, held, len(shards)))
    _name_shards(folder, shards, stem)
    config.save_pretrained(folder)
    respell_folder(folder)
    copy_tokenizer(base, folder)


def _num_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _write_shard(folder: Path, tensors: dict[str, torch.Tensor], number: int) -> list[str]:
    save_file(tensors, folder / f"part-{number:05d}.safetensors", metadata={"format": "pt"})
    return list(tensors)


def _name_shards(folder: Path, shards: list[list[str]], stem: str) -> None:
    """The names that transformers expects, which tell how many shards there are."""
    if len(shards) == 1:
        (folder / "part-00000.safetensors").rename(folder / f"{stem}.safetensors")
        return
    index: dict[str, str] = {}
    for number, names in enumerate(shards):
        final = f"{stem}-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{number:05d}.safetensors").rename(folder / final)
        index |= dict.fromkeys(names, final)
    total = sum(path.stat().st_size for path in folder.glob(f"{stem}-*.safetensors"))
    _write_json(
        folder / f"{stem}.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index}
    )


def copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy2(source / name, target / name)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
