"""Identify a model by its weights and configuration, and read the record that crosstune writes into its folders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstune.core.quantization import wrong_spec
from crosstune.files.json_fields import NOTHING, OBJECT, TEXT, check_fields, list_of, whole
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
_FIELDS = {
    "base": OBJECT | NOTHING,
    "quantization": OBJECT | NOTHING,
    "precision": TEXT | NOTHING,
    "new_blocks": list_of(whole(0)),
    "converted": OBJECT | NOTHING,
    "exported": OBJECT | NOTHING,
    "against_trained": OBJECT | NOTHING,
    "chat_template": TEXT | NOTHING,
}
_BASE = {"name": TEXT | NOTHING, "identity": OBJECT | NOTHING}
_IDENTITY = {"version": whole(1) | NOTHING, "sha256": TEXT | NOTHING, "weights_sha256": TEXT | NOTHING}
_MADE = {
    "original": OBJECT | NOTHING,
    "source_identity": TEXT | NOTHING,
    "source_config": TEXT | NOTHING,
    "own_identity": TEXT | NOTHING,
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
    files = {path.name: path.stat().st_size for path in paths}
    return {
        "version": VERSION,
        "sha256": both,
        "config_sha256": config,
        "weights_sha256": weights.hexdigest(),
        "files": files,
    }


def recorded_sha256(record: Mapping[str, Any]) -> str | None:
    """Return the identity of the base in the record of an adapter; None if it is missing or of another version."""
    found = (record.get("base") or {}).get("identity") or {}
    return found.get("sha256") if found.get("version") == VERSION else None


def config_identity(config: dict[str, Any]) -> str:
    """Return a hash of the configuration, without the keys that change no logits."""
    return hashlib.sha256(json.dumps(_numbers(config), sort_keys=True).encode()).hexdigest()


def source_identity(folder: Path) -> dict[str, str]:
    """Return the identities of weights and configuration, or of their source for a folder that crosstune converted.

    The record of the source counts only while the folder still holds the weights that it was written with.
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
    """Return the record of a folder; an empty one for a folder that crosstune did not write."""
    path = folder / RECORD
    record = read_json(path)
    check_fields(record, _FIELDS, source=path)
    wrong = wrong_spec(record.get("quantization"))
    if wrong is not None:
        raise UnreadableFile(path, f"quantization in it cannot be read: {wrong}")
    base = record.get("base") or {}
    check_fields(base, _BASE, source=path, place="base.")
    check_fields(base.get("identity") or {}, _IDENTITY, source=path, place="base.identity.")
    for made in ("converted", "exported"):
        check_fields(record.get(made) or {}, _MADE, source=path, place=f"{made}.")
        check_original((record.get(made) or {}).get("original"), path=path)
    return record


def check_original(original: dict[str, Any] | None, *, path: Path) -> None:
    """Check the record of the weights that were quantized: name, path and identity."""
    rules = {"name": TEXT, "path": TEXT, "identity": TEXT}
    if original is not None:
        check_fields(original, rules, required=tuple(rules), source=path, place="original.")


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items() if key not in _NOT_NUMBERS}
    return value
