"""Choose the defaults of a judge's training by the backend and its memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstune.config.conditions import REPLICATED
from crosstune.config.resolve.facts import Preset
from crosstune.config.schema import Config
from crosstune.estimate.machine import BackendReport
from crosstune.estimate.memory import GIB

GUIDE_DATA = "datasets/judge_eval"
DEMO_DATA = "judge_translations"
SMALL_CARD_BYTES, LARGE_CARD_BYTES = 9 * 10**9, 15 * 10**9
"""A card of 8 GB reports less than the first, a card of 16 GB more than the second."""
BYTES_PER_PARAMETER = 4
"""Memory of LoRA on a 16-bit base: 12 GB for three billion parameters, two rows of 512 tokens (from the original interface)."""

ALL: Mapping[str, Any] = {
    "num_epochs": 3,
    "context_length": 512,
    "truncation": "drop",
    "lora_target_modules": "attention",
    "lora_dropout": 0.05,
    "wd": 0.01,
    "eval_steps": 100,
    "save_steps": 200,
    "eval_samples": 200,
    "gradient_accumulation_steps": 2,
}
LAPTOP: Mapping[str, Any] = {
    "model_name": "Qwen/Qwen2-1.5B-Instruct",
    "train_type": "lora",
    "optimizer": "adamw",
    "batch_size": 1,
    "lr": 1e-4,
    "grad_norm": 1.0,
}
GPU: Mapping[str, Any] = {
    "model_name": "Qwen/Qwen2.5-3B-Instruct",
    "train_type": "qlora",
    "quant_type": "nf4",
    "double_quant": True,
    "optimizer": "paged_adamw_8bit",
    "batch_size": 2,
    "lr": 2e-4,
    "grad_norm": 0.3,
    "use_gradient_checkpointing": True,
}
BY_BACKEND: Mapping[str, Mapping[str, Any]] = {
    "mps": {**LAPTOP, "precision": "fp32"},
    "cpu": {**LAPTOP, "precision": "fp32"},
    "mlx": LAPTOP,
    "cuda": GPU,
    "rocm": GPU,
    "xpu": GPU,
}
LARGEST_AT_RANK_16 = {"mps": 2.0, "cpu": 2.0, "mlx": 2.0}
"""Billions of parameters above which adapters have rank 8; 4 on other backends."""
OPTIONS = (
    "dataset",
    "lora_rank",
    "lora_alpha",
    "rows_per_step",
    "sharding_strategy",
    *ALL,
    *GPU,
    "precision",
)
"""Every option that a preset may set."""
_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s*([bm])(?![a-z])", re.I)


def choose_preset(config: Config, report: BackendReport) -> dict[str, Preset]:
    """Return the presets of options that were not set."""
    name, title = report.name, f"the judge's preset for {report.name}"
    values: dict[str, tuple[Any, str]] = {
        option: (value, title) for option, value in {**ALL, **BY_BACKEND[name]}.items()
    }
    if Path(GUIDE_DATA).is_dir():
        values["dataset"] = (GUIDE_DATA, "the original interface's folder exists")
    else:
        why = f"there is no folder {GUIDE_DATA}: this is the bundled data; pass your own with --dataset"
        values["dataset"] = (DEMO_DATA, why)
    model = config.model_name if "model_name" in config.sources else str(values["model_name"][0])
    billions = read_billions(model)
    if billions is not None and billions > LARGEST_AT_RANK_16.get(name, 4.0):
        why = f"{title} for a model of {billions:g} billion parameters"
        values |= {"lora_rank": (8, why), "lora_alpha": (16, why)}
    if BY_BACKEND[name] is GPU:
        values |= _fit_card(report.memory_total_bytes, billions)
    method = config.train_type if "train_type" in config.sources else values["train_type"][0]
    has_adapters = "lora" in str(method) or "dora" in str(method)
    if not has_adapters:
        for option in ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules"):
            values.pop(option, None)
    if config.no_4bit or not any(word in str(method) for word in ("qlora", "bnb")):
        for option in ("quant_type", "double_quant"):
            values.pop(option, None)
    if "max_steps" in config.sources:
        values.pop("num_epochs")
    if config.skip_eval:
        values.pop("eval_steps")
    if config.world_size > 1:
        values |= _share_rows(config, values)
        # An 8-bit optimizer does not work with shards.
        if BY_BACKEND[name] is GPU and "optimizer" not in config.sources:
            if has_adapters and "sharding_strategy" not in config.sources:
                values["sharding_strategy"] = ("ddp", f"{title}: adapters need no shards")
            elif config.sharding_strategy not in REPLICATED:
                values.pop("optimizer")
    return {
        option: Preset(value=value, reason=why)
        for option, (value, why) in values.items()
        if option not in config.sources
    }


def _share_rows(config: Config, values: Mapping[str, tuple[Any, str]]) -> dict[str, tuple[Any, str]]:
    """Return options that divide the rows of a step on one device among several; none if the user sets the rows."""
    size = config.batch_size if "batch_size" in config.sources else values["batch_size"][0]
    if not size or {"rows_per_step", "gradient_accumulation_steps"} & config.sources.keys():
        return {}
    rows = size * values["gradient_accumulation_steps"][0]
    why = f"the rows of a step on one device, divided among {config.world_size}"
    smaller = min(size, max(1, rows // config.world_size))
    return {
        "rows_per_step": (rows, why),
        "batch_size": (smaller, why),
        "gradient_accumulation_steps": (1, why),
    }


def read_billions(model: str) -> float | None:
    """Return the billions of parameters in a model's name, such as 1.5 for Qwen2-1.5B-Instruct."""
    found = _SIZE.search(model.rpartition("/")[2].replace("-", " ").replace("_", " "))
    if found is None:
        return None
    return float(found[1]) / (1 if found[2].lower() == "b" else 1000)


def _fit_card(total_bytes: int, billions: float | None) -> dict[str, tuple[Any, str]]:
    """Return the original interface's presets for a card with this much memory."""
    size = f"a GPU with {total_bytes / GIB:.0f} GiB"
    if 0 < total_bytes <= SMALL_CARD_BYTES:
        return {"batch_size": (1, size), "gradient_accumulation_steps": (4, size)}
    fits = billions is not None and BYTES_PER_PARAMETER * 1e9 * billions <= total_bytes
    if total_bytes >= LARGE_CARD_BYTES and fits:
        return {"train_type": ("lora", f"{size} fits the model without 4-bit quantization, which is faster")}
    return {}
