"""Scale the rotary positions of a model for longer rows: a cached folder with links to its files and another config.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.files.json_files import write_json
from crosstune.models.added_tokens import copy_settings, setting_files
from crosstune.models.cache import install
from crosstune.models.folder import read_config_json, weight_files
from crosstune.models.identity import read_record
from crosstune.models.llama_layout import CONFIG
from crosstune.models.locate import ModelFolder

_WITH_ORIGINAL = ("yarn", "llama3")
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""The values of Llama 3.1."""
_WITHOUT = "remove --rope_scaling and --rope_factor"


def scale_rope(model: ModelFolder, kind: str, factor: float) -> ModelFolder:
    """Return the model with the rotary positions of --rope_scaling."""
    folder = model.path
    config = scaled_config(read_config_json(folder), kind, factor, name=model.name)
    if read_record(folder).get("quantization"):  # the record of its original weights would be lost
        raise _refused(
            model.name,
            why="its weights were quantized by crosstune, for the positions of its original.",
            do="use the original model; --train_type qlora quantizes it on load",
        )
    files = [*setting_files(folder), *weight_files(folder)]
    source = {
        "kind": "rope_scaling",
        "folder": str(folder.resolve()),
        "config": config,
        "files": [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files],
    }

    def build(target: Path, _: Path) -> None:
        copy_settings(folder, target)
        for path in weight_files(folder):
            (target / path.name).symlink_to(path.resolve())
        write_json(target / CONFIG, config)

    digest = hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()
    key = f"{Path(model.name).name}-{kind}-{factor:g}-{digest[:12]}"
    need = sum(path.stat().st_size for path in setting_files(folder))
    path = install(key, build, need_bytes=need, source=source)
    return replace(model, path=path, base=model.base or str(folder))


def scaled_config(config: Mapping[str, Any], kind: str, factor: float, *, name: str) -> dict[str, Any]:
    """Return config.json with the scaling in the fields of transformers 5 and of older readers."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(config.get("text_config"), dict):
        raise _refused(name, why="it reads pictures, and their positions do not follow the row.")
    if not {"rope_parameters", "rope_scaling", "rope_theta"} & config.keys():
        raise _refused(name, why=f"its {CONFIG} describes no rotary positions.")
    if kinds := sorted(key for key, value in given.items() if isinstance(value, dict)):
        raise _refused(name, why=f"its layers have rotary positions of different kinds ({', '.join(kinds)}).")
    scaled = given.get("rope_type") or given.get("type") or "default"
    if scaled != "default":
        by = f" by {given['factor']:g}" if isinstance(given.get("factor"), (int, float)) else ""
        raise _refused(
            name,
            why=f"its positions are already scaled ({scaled}{by}).",
            do=f"{_WITHOUT}, or train a copy of the model with another rope_scaling in its {CONFIG}",
        )
    trained = config.get("max_position_embeddings")
    if not trained:
        raise _refused(
            name, why=f"its {CONFIG} lacks max_position_embeddings, the length that the scaling starts from."
        )
    theta = given.get("rope_theta") or config.get("rope_theta")
    rope = {
        **{key: value for key, value in given.items() if key != "type"},
        "rope_type": kind,
        "factor": factor,
    }
    rope |= {"rope_theta": theta} if theta else {}
    if kind in _WITH_ORIGINAL:
        rope["original_max_position_embeddings"] = trained
    if kind == "llama3":
        rope |= _LLAMA3
    # transformers takes the length from which `dynamic` scales from max_position_embeddings.
    longest = trained if kind == "dynamic" else int(trained * factor)
    return {**config, "rope_parameters": rope, "rope_scaling": rope, "max_position_embeddings": longest}


def _refused(name: str, *, why: str, do: str = _WITHOUT) -> UserError:
    return UserError(f"--rope_scaling does not work with {name}.", why=why, do=do)
