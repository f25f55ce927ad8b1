"""A checkpoint read by its documentation alone: json, hashlib, numpy and safetensors; nothing of crosstune."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

WEIGHTS, MOMENTS, RANDOM = "weights.safetensors", "moments.safetensors", "random.safetensors"


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """Its manifest, weights by name, moments by slot and name, random states by generator."""
    raw = (folder / "manifest.json").read_bytes()
    seal = f"{hashlib.sha256(raw).hexdigest()}  manifest.json\n"
    if (folder / "manifest.sha256").read_text() != seal:
        raise ValueError("the manifest was changed")
    manifest = json.loads(raw)
    if (manifest["format"], manifest["format_version"]) != ("crosstune-checkpoint", 1):
        raise ValueError("another format")
    found = {path.name for path in folder.iterdir()}
    if found != {"manifest.json", "manifest.sha256", *manifest["files"]}:
        raise ValueError("a file too many or too few")
    for name, facts in manifest["files"].items():
        content = (folder / name).read_bytes()
        if len(content) != facts["bytes"] or hashlib.sha256(content).hexdigest() != facts["sha256"]:
            raise ValueError(f"{name} was changed")
    weights = load_file(folder / WEIGHTS)
    for name, facts in manifest["trainable"].items():
        if list(weights[name].shape) != facts["shape"]:
            raise ValueError(f"{name} has another shape")
    moments: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
    for key, array in load_file(folder / MOMENTS).items():
        slot, _, name = key.partition("/")
        moments.setdefault(slot, {})[name] = array
    random = load_file(folder / RANDOM)
    return {"manifest": manifest, "weights": weights, "moments": moments, "random": random}
