"""Convert adapters between the layouts of PEFT and mlx-lm: matrices are transposed, values stay exact."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.files.json_files import write_json
from crosstune.models.adapter_choice import AdapterSettings, Targets
from crosstune.models.adapter_files import (
    PEFT_PREFIX,
    PEFT_WEIGHTS,
    SETTINGS,
    UNREAD,
    copy_tokenizer,
    peft_settings,
    read_settings,
)
from crosstune.models.identity import RECORD
from crosstune.models.weights import Tensor, read_arrays, write_safetensors

MLX_WEIGHTS = "adapters.safetensors"
_MLX_PART = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b", "lora_magnitude_vector": "m"}
_PEFT_PART = {mlx: peft for peft, mlx in _MLX_PART.items()}
_KEPT = "peft"
"""Key of PEFT's settings inside mlx-lm's; mlx-lm ignores unknown keys."""
_NOT_IN_MLX = (*UNREAD, "modules_to_save", "fan_in_fan_out", "target_parameters")
"""Features of PEFT that mlx-lm's adapters cannot express."""

Stored = tuple[str, NDArray[Any]]
"""A dtype name, and the values or their bits."""


def adapter_form(folder: Path) -> str | None:
    """Return `peft` or `mlx`, depending on the folder's weights file; None if it contains no adapter."""
    if (folder / PEFT_WEIGHTS).is_file():
        return "peft"
    return "mlx" if (folder / MLX_WEIGHTS).is_file() else None


def to_mlx(source: Path, target: Path, *, base: str | None = None) -> None:
    """Convert a PEFT adapter folder for mlx-lm. `base` replaces the base model's name."""
    settings = {**read_settings(source), **({"base_model_name_or_path": base} if base else {})}
    unread = [name for name in _NOT_IN_MLX if settings.get(name)]
    if settings.get("peft_type") != "LORA" or unread:
        raise UserError(
            f"{source} cannot be written for MLX.",
            why=f"mlx-lm's adapters do not support {', '.join(unread) or settings.get('peft_type')}.",
            do="export the merged model (crosstune export --to mlx), or use an adapter on attention",
        )
    tensors = {
        _rename(name.removeprefix(PEFT_PREFIX), _MLX_PART, source): stored
        for name, stored in _read(source, PEFT_WEIGHTS).items()
    }
    _write(source, target, MLX_WEIGHTS, tensors, _mlx_settings(settings, tensors))


def to_peft(source: Path, target: Path, *, base: str | None = None) -> None:
    """Convert an mlx-lm adapter folder for PEFT. `base` is the base model's name, if the folder lacks it."""
    settings = read_settings(source)
    kind = settings.get("fine_tune_type", "lora")
    if "lora_parameters" not in settings or kind not in ("lora", "dora"):
        raise UserError(
            f"{source} cannot be written for PEFT.",
            why=f"its {SETTINGS} does not describe an mlx-lm adapter (fine_tune_type {kind}).",
        )
    tensors = {
        PEFT_PREFIX + _rename(name, _PEFT_PART, source): stored
        for name, stored in _read(source, MLX_WEIGHTS).items()
    }
    _write(source, target, PEFT_WEIGHTS, tensors, _peft_settings(source, settings, tensors, base))


def _mlx_settings(settings: Mapping[str, Any], tensors: Mapping[str, Stored]) -> dict[str, Any]:
    """Return mlx-lm's settings, with full names of the layers."""
    layers = sorted({name.rpartition(".")[0] for name in tensors})
    rank = settings["r"]
    numbers = {int(found.group(1)) for name in layers if (found := re.search(r"\.layers\.(\d+)\.", name))}
    return {
        "fine_tune_type": "dora" if settings.get("use_dora") else "lora",
        "num_layers": len(numbers),
        "model": settings.get("base_model_name_or_path"),
        "lora_parameters": {
            "rank": rank,
            "scale": settings["lora_alpha"] / (rank**0.5 if settings.get("use_rslora") else rank),
            "dropout": settings.get("lora_dropout", 0.0),
            "keys": layers,
        },
        _KEPT: dict(settings),
    }


def _peft_settings(
    source: Path, settings: Mapping[str, Any], tensors: Mapping[str, Stored], base: str | None
) -> dict[str, Any]:
    kept = settings.get(_KEPT)
    if isinstance(kept, dict):
        return {**kept, **({"base_model_name_or_path": base} if base else {})}
    base = base or settings.get("model")
    if not base:
        raise UserError(
            f"{source} does not record its base model, which PEFT needs.",
            do="specify it with --original",
        )
    lora = settings["lora_parameters"]
    layers = {name.removeprefix(PEFT_PREFIX).partition(".lora_")[0] for name in tensors}
    found = AdapterSettings(
        rank=lora["rank"],
        alpha=lora["scale"] * lora["rank"],
        dropout=lora.get("dropout", 0.0),
        rank_stabilized=False,
        magnitudes=settings.get("fine_tune_type") == "dora",
    )
    return peft_settings(found, Targets(modules=sorted(layers)), base=base)


def _rename(name: str, parts: Mapping[str, str], source: Path) -> str:
    for ending, other in parts.items():
        if name.endswith("." + ending):
            return f"{name.removesuffix(ending)}{other}"
    raise UserError(f"The adapter {source} contains {name}, which is not part of a LoRA or DoRA layer.")


def _read(folder: Path, name: str) -> dict[str, Stored]:
    if not (folder / name).is_file():
        raise UserError(f"{folder} is not an adapter folder of this kind.", why=f"it has no {name}.")
    arrays = read_arrays(folder / name)
    stacked = [key for key, (_, values) in arrays.items() if values.ndim > 2]
    if stacked:
        raise UserError(
            f"The adapter {folder} cannot be converted.",
            why=f"{stacked[0]} stacks the matrices of several experts; PEFT stacks them differently.",
            do="use it with the library that wrote it, or fuse it (mlx_lm.fuse)",
        )
    return arrays


def _write(
    source: Path, target: Path, name: str, tensors: Mapping[str, Stored], settings: dict[str, Any]
) -> None:
    """Write the settings and the tensors, with matrices transposed, and copy the other files."""
    target.mkdir(parents=True, exist_ok=True)
    transposed = [
        Tensor(name=part, dtype=dtype, shape=values.T.shape, rows=[values.T])
        for part, (dtype, values) in sorted(tensors.items())
    ]
    write_safetensors(target / name, transposed)
    write_json(target / SETTINGS, settings)
    copy_tokenizer(source, target)
    if (source / RECORD).is_file():
        shutil.copyfile(source / RECORD, target / RECORD)
