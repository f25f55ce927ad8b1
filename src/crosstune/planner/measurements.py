"""Store measurements of this machine in the cache, and correct predicted memory by the peaks of earlier runs."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstune.config.load import cache_base
from crosstune.config.resolve.plan import Plan
from crosstune.core.errors import UserError
from crosstune.estimate.machine import Machine
from crosstune.estimate.memory import Correction
from crosstune.files.json_fields import OBJECT, map_of, object_with, real
from crosstune.files.json_files import read_json, write_json

FORMAT = 1
MAX_ENTRIES = 500
"""Older entries are removed."""
_LIMIT_BYTES = 4 << 20
FILE = "peak_memory"
_ENTRY = object_with({"key": OBJECT, "value": map_of(real()), "time": real()})
MAX_RUNS = 20
"""The newest runs that count."""
MIN_SHARE = 1.0
"""Runs are ignored if their tensors need less than this multiple of the framework's overhead."""
BOUNDS = (0.5, 2.0)
"""Limits of a correction; a larger deviation has other causes than the size of the step."""


def remember(name: str, key: Mapping[str, Any], value: Mapping[str, float]) -> None:
    """Store numbers under a key in the file `name`, replacing older numbers of the key."""
    entries = recall_all(name)
    entries[digest(key)] = {"key": dict(key), "value": dict(value), "time": time.time()}
    newest = sorted(entries.items(), key=lambda item: item[1]["time"])[-MAX_ENTRIES:]
    try:
        path = _path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"format": FORMAT, "entries": dict(newest)})
    except (OSError, UserError):
        return  # a full or read-only disk, or no home folder: the next plan is not corrected


def recall(name: str, key: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the numbers stored under a key."""
    found = recall_all(name).get(digest(key))
    return found["value"] if found is not None else None


def recall_all(name: str) -> dict[str, dict[str, Any]]:
    """Return all valid entries of a file: digest of the key -> key, value and time."""
    try:
        stored = read_json(_path(name), limit=_LIMIT_BYTES)
    except (UserError, OSError):
        return {}
    entries = stored.get("entries")
    if stored.get("format") != FORMAT or not isinstance(entries, dict):
        return {}
    return {digest(entry["key"]): entry for entry in entries.values() if _ENTRY.fits(entry)}


def digest(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _path(name: str) -> Path:
    return cache_base() / "measured" / f"{name}.json"


def record_peak(plan: Plan, measured_bytes: int) -> None:
    """Store the measured and the predicted peak of a finished run."""
    fitted = plan.fitted
    if fitted is None or measured_bytes <= 0:
        return
    overhead = fitted.parts.overhead
    if fitted.parts.total - overhead < MIN_SHARE * overhead:
        return
    # The measured peak of a GPU does not include the framework's overhead.
    counted = fitted.parts.total - (0 if plan.backend.is_torch_cpu else overhead)
    step = fitted.step
    key: dict[str, Any] = {
        "machine": plan.machine.name,
        "backend": plan.backend.name,
        "parameters": fitted.shape.num_parameters,
        "method": step.method,
        "quantizer": step.quantizer,
        "batch": step.batch,
        "context": step.context,
        "checkpointing": step.checkpointing,
        "kernels": plan.config.kernels,
        "precision": plan.precision,
    }
    remember(FILE, key, {"predicted": counted, "measured": measured_bytes})


def read_corrections(machine: Machine) -> dict[str, Correction]:
    """Return backend -> the median ratio of measured to predicted peaks on a machine."""
    found: dict[str, list[tuple[float, float]]] = {}
    for entry in recall_all(FILE).values():
        key, value = entry["key"], entry["value"]
        predicted, measured = value.get("predicted", 0), value.get("measured", 0)
        if key.get("machine") == machine.name and predicted > 0 and measured > 0:
            found.setdefault(str(key.get("backend")), []).append((entry["time"], measured / predicted))
    corrections = {}
    for backend, ratios in found.items():
        newest = [ratio for _, ratio in sorted(ratios)[-MAX_RUNS:]]
        factor = min(max(statistics.median(newest), BOUNDS[0]), BOUNDS[1])
        corrections[backend] = Correction(factor=factor, num_runs=len(newest))
    return corrections
