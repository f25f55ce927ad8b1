"""Convert values of torchtune and mlx-lm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstune.core.schedule import SCHEDULES
from crosstune.importing.dataset_values import rename_columns
from crosstune.importing.values import Found, Missing, Noted, Nothing, is_off, last_part, optimizer
from crosstune.models.folder import folder_shape
from crosstune.models.known_models import known_shape

_SMALL_START = 0.05
"""A warm-up that begins below this share of the peak may begin at 0."""


def steps_per_epoch(value: Any, given: Mapping[str, Any]) -> Found:
    if is_off(value):
        return {}
    epochs = int(given.get("epochs") or 1)
    return {"max_steps": int(value) * epochs, "num_epochs": epochs}


def mlx_steps(value: Any, given: Mapping[str, Any]) -> Found:
    return {"max_steps": max(1, int(value) // max(1, int(given.get("grad_accumulation_steps") or 1)))}


def mlx_val_batches(value: Any, given: Mapping[str, Any]) -> Found:
    if int(value) == 0:
        return {"skip_eval": True}
    return {"eval_samples": int(value) * int(given.get("batch_size") or 4) if int(value) > 0 else 10**6}


def mlx_schedule(value: Any, given: Mapping[str, Any]) -> Found:
    if is_off(value):
        return {}
    unknown = Missing(f"use --lr_scheduler {', '.join(SCHEDULES)}")
    if not isinstance(value, Mapping):
        return unknown
    arguments, start = value.get("arguments") or [], float(value.get("warmup_init") or 0.0)
    if start > _SMALL_START * float(next(iter(arguments), 0.0)):
        return Missing("the warm-up of crosstune begins at 0: remove warmup_init")
    found: dict[str, Any] = {"warmup_steps": int(value.get("warmup") or 0)}
    if start:
        found = Noted(found, f"the warm-up begins at 0, not at {start:g}")
    if value.get("name") == "cosine_decay" and arguments:
        peak, end = float(arguments[0]), float(arguments[2]) if len(arguments) > 2 else 0.0
        found |= {"lr_scheduler": "cosine", "lr": peak, "cosine_min_lr_ratio": end / peak}
        return found
    if value.get("name") == "linear_schedule" and len(arguments) > 1 and float(arguments[1]) == 0:
        found |= {"lr_scheduler": "linear", "lr": float(arguments[0])}
        return found
    return unknown


def mlx_optimizer(value: Any, given: Mapping[str, Any]) -> Found:
    name = str(given.get("optimizer") or "adam")
    settings = value.get(name) if isinstance(value, Mapping) else None
    if not isinstance(settings, Mapping) or not settings:
        return {}
    ours = {"weight_decay": "wd", "eps": "adam_epsilon"}
    found: dict[str, Any] = {ours[key]: number for key, number in settings.items() if key in ours}
    if isinstance(pair := settings.get("betas"), list):
        found |= dict(betas(pair, given))  # type: ignore[arg-type]
    other = set(settings) - {*ours, "betas", "bias_correction"}
    return Missing(f"no option for {sorted(other)[0]}") if other else found


def mlx_scale(value: Any, given: Mapping[str, Any]) -> Found:
    return {"lora_alpha": float(value) * float(given.get("lora_parameters.rank") or 8)}


def last_layers(value: Any, given: Mapping[str, Any]) -> Found:
    """Convert a number of last layers; the number of all layers is in the table of known models or in the model's folder."""
    last, name = int(value), str(given.get("model"))
    if last < 0:
        return {}
    folder = Path(name).expanduser()
    shape = folder_shape(folder) if (folder / "config.json").is_file() else known_shape(name)
    if shape is None:
        return Missing(
            f"--layers_to_transform lists the layers; mlx-lm trains the last {last}: with 28 layers, {28 - last}-27"
        )
    if last >= shape.num_layers:
        return {}
    return {"layers_to_transform": f"{shape.num_layers - last}-{shape.num_layers - 1}"}


def adapter_folder(value: Any, given: Mapping[str, Any]) -> Found:
    path = Path(str(value))
    return {"name": path.name} | ({"output_dir": str(path.parent)} if path.parent != Path() else {})


def betas(value: Any, given: Mapping[str, Any]) -> Found:
    if isinstance(value, (list, tuple)) and len(value) == 2:
        return {"adam_beta1": value[0], "adam_beta2": value[1]}
    return Missing("use --adam_beta1 and --adam_beta2")


def tune_model(value: Any, given: Mapping[str, Any]) -> Found:
    name = last_part(value)
    kind = "qlora" if name.startswith("qlora") else "lora" if name.startswith("lora") else "full"
    return {"train_type": kind}


def tune_targets(value: Any, given: Mapping[str, Any]) -> Found:
    ours = {"output_proj": "o_proj"}
    names = [ours.get(str(name), str(name)) for name in value]
    if given.get("model.apply_lora_to_mlp"):
        names += ["gate_proj", "up_proj", "down_proj"]
    if given.get("model.apply_lora_to_output"):
        names.append("lm_head")
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    return {"lora_target_modules": "all" if set(names) == every else ",".join(names)}


def tune_optimizer(value: Any, given: Mapping[str, Any]) -> Found:
    name = last_part(value)
    if name == "AdamW" and given.get("optimizer.fused"):
        return {"optimizer": "fused_adamw"}
    return optimizer(name, given)


def tune_columns(value: Any, given: Mapping[str, Any]) -> Found:
    """Convert the column of conversations, or a mapping of torchtune's columns to those of the data."""
    ours = {
        "input": "prompt",
        "output": "completion",
        **{name: name for name in ("prompt", "chosen", "rejected")},
    }
    if is_off(value) or value in ("messages", "conversations"):
        return {}
    if isinstance(value, str):
        return {"columns": f"{value}=messages"}
    return rename_columns({value[name]: ours[name] for name in value})


def tune_loss(value: Any, given: Mapping[str, Any]) -> Found:
    losses = {"DPOLoss": "dpo", "RSOLoss": "hinge", "SimPOLoss": "simpo"}
    if last_part(value) in losses:
        return {"recipe": "preference", "preference_loss": losses[last_part(value)]}
    if "CrossEntropy" in str(value) or last_part(value).startswith("CEWith"):
        return Nothing("crosstune has its own memory-saving loss")
    return Missing("use a loss of --preference_loss")


def tune_logger(value: Any, given: Mapping[str, Any]) -> Found:
    if chosen := {"WandBLogger": "wandb", "TensorBoardLogger": "tensorboard"}.get(last_part(value)):
        return {"log_to": f"tqdm,{chosen}"}
    return Nothing("every step is in metrics.jsonl of the run folder")
