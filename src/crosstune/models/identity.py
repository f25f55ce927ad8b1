"""Identify a model by its weights and configuration, and read the record that crosstune writes into its folders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstune.config.resolve.plan import Plan
from crosstune.core.quantization import wrong_spec
from crosstune.files.json_fields import NOTHING, OBJECT, TEXT, check_fields, list_of, object_with, real, whole
from crosstune.files.json_files import read_json
from crosstune.files.plain_files import UnreadableFile
from crosstune.models.file_hashes import sha256_of_all
from crosstune.models.folder import read_config_json, weight_files
from crosstune.models.llama_layout import CONFIG
from crosstune.models.staged import Progress, silent

RECORD = "crosstune.json"
_NOT_NUMBERS = frozenset(
    [
        "_attn_implementation",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "label2id",
        "pad_token_id",
        "quantization",
        "quantization_config",
        "task_specific_params",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    ]
)
"""Keys of config.json that change no logits: names, versions, generation defaults, and storage of the weights."""
VERSION = 2
"""Version 1 covered samples of the files only, and cannot be compared."""
ORIGINAL = object_with({"name": TEXT, "path": TEXT, "identity": TEXT}) | NOTHING
"""The record of the weights that were quantized."""
_MADE = {
    "original": ORIGINAL,
    **dict.fromkeys(("source_identity", "source_config", "own_identity"), TEXT | NOTHING),
}
_FIELDS = {
    "": {
        **dict.fromkeys(
            ("base", "quantization", "converted", "exported", "against_trained"), OBJECT | NOTHING
        ),
        **dict.fromkeys(("precision", "chat_template", "add_tokens"), TEXT | NOTHING),
        "rope_scaling": object_with({"rope_scaling": TEXT, "rope_factor": real(1)}) | NOTHING,
        "new_blocks": list_of(whole(0)),
    },
    "base.": {"name": TEXT | NOTHING, "identity": OBJECT | NOTHING},
    "base.identity.": {
        "version": whole(1) | NOTHING,
        **dict.fromkeys(("sha256", "weights_sha256"), TEXT | NOTHING),
    },
    "converted.": _MADE,
    "exported.": _MADE,
}


def identity(folder: Path, *, progress: Progress = silent) -> dict[str, Any]:
    """Return the identity of a model folder.

    `weights_sha256` covers name and every byte of each safetensors file, `config_sha256` the configuration, and `sha256`
    both. Files are hashed once, as long as they do not change.
    """
    paths = weight_files(folder)
    hashes = sha256_of_all(paths, progress=lambda done, total: progress("hash", done, total))
    weights = hashlib.sha256()
    for path in paths:
        weights.update(f"{path.name}\0{hashes[path]}\0".encode(errors="surrogateescape"))
    config = config_identity(read_config_json(folder))
    both = hashlib.sha256(f"{config}\0{weights.hexdigest()}".encode()).hexdigest()
    return {
        "version": VERSION,
        "sha256": both,
        "config_sha256": config,
        "weights_sha256": weights.hexdigest(),
        "files": {path.name: path.stat().st_size for path in paths},
    }


def recorded_sha256(record: Mapping[str, Any]) -> str | None:
    """Return the base's identity from an adapter's record; None if it is missing or of an older version."""
    found = (record.get("base") or {}).get("identity") or {}
    return found.get("sha256") if found.get("version") == VERSION else None


def config_identity(config: dict[str, Any]) -> str:
    """Return a hash of the configuration, without the keys that change no logits."""
    return hashlib.sha256(json.dumps(_numbers(config), sort_keys=True).encode()).hexdigest()


def source_identity(folder: Path) -> dict[str, str]:
    """Return the identities of weights and configuration; for a folder that crosstune converted, of their source.

    The recorded source is ignored if the weights have changed since.
    """
    record = read_record(folder)
    conversion = record.get("converted") or record.get("exported") or {}
    found = identity(folder)
    if conversion.get("own_identity") != found["weights_sha256"]:
        conversion = {}
    return {
        "weights": str(conversion.get("source_identity") or found["weights_sha256"]),
        "config": str(conversion.get("source_config") or found["config_sha256"]),
    }


def source_record(source: Path, *, result: Path) -> dict[str, str]:
    """Return the identities of a conversion's source and result, for its record."""
    found = source_identity(source)
    record = {"source_identity": found["weights"], "source_config": found["config"]}
    if (result / CONFIG).is_file():  # not for a GGUF file
        record["own_identity"] = identity(result)["weights_sha256"]
    return record


def read_record(folder: Path) -> dict[str, Any]:
    """Return a folder's record; empty if crosstune did not write the folder."""
    path = folder / RECORD
    record = read_json(path)
    for place, rules in _FIELDS.items():
        part = record
        for key in place.split(".")[:-1]:
            part = part.get(key) or {}
        check_fields(part, rules, source=path, place=place)
    wrong = wrong_spec(record.get("quantization"))
    if wrong is not None:
        raise UnreadableFile(path, f"quantization in it cannot be read: {wrong}")
    return record


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items() if key not in _NOT_NUMBERS}
    return value


def base_record(folder: Path, plan: Plan) -> dict[str, Any]:
    """Return the identity of the base weights, their quantization and the precision of training."""
    spec = plan.quant_spec
    return {
        "base": {"name": plan.config.model_name, "identity": identity(folder)},
        "quantization": spec.to_json() if spec is not None else None,
        "precision": plan.precision,
    }
