"""Read checkpoints written by `torch.save`, restricted to tensors and plain values."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from crosstune.core.errors import LIBRARY_FAULTS, UserError
from crosstune.core.protocols import Array

_MODEL_KEYS = ("model_state_dict", "state_dict", "model")
_OPTIMIZER_KEYS = ("optimizer_state_dict", "optimizer")
_PREFIXES = re.compile(r"^(module\.|_orig_mod\.|base_model\.model\.)+")
_SLOTS = {"exp_avg": "first_moment", "exp_avg_sq": "second_moment", "step": "step"}


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A checkpoint from a different tool, with weights under transformers' names."""

    weights: Mapping[str, Array]
    """In the order of the file and of the model's parameters."""
    moments: Mapping[int, Mapping[str, Array]] = field(default_factory=dict)
    """Parameter index in the optimizer -> slot -> array."""
    order: tuple[int, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Other plain values: backend, precision, epoch and so on."""


def read_foreign(path: Path) -> Foreign:
    """Read a torch.save file with `weights_only=True`, so that no code runs."""
    if not path.is_file():
        raise UserError(f"There is no file {path}.", do="specify a file written by torch.save")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, zipfile.BadZipFile, EOFError, *LIBRARY_FAULTS) as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        why = f"{named[1]} could run code" if named else "it is damaged or not a torch.save file"
        raise UserError(
            f"{path} cannot be imported.",
            why=f"{why}; only tensors and plain values are read.",
            do="save it again as a dict of state dicts and plain values, with torch.save",
        ) from error
    if not isinstance(content, Mapping):
        raise UserError(f"{path} contains a {type(content).__name__}, not a dict of state dicts.")
    return _split(path, content)


def _split(path: Path, content: Mapping[Any, Any]) -> Foreign:
    model_key = next((key for key in _MODEL_KEYS if isinstance(content.get(key), Mapping)), None)
    tensors = content[model_key] if model_key is not None else content
    weights = {
        _plain_name(str(name)): _array(value)
        for name, value in tensors.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    if not weights:
        raise UserError(
            f"{path} contains no weights.",
            why=f"it has none of the keys {', '.join(_MODEL_KEYS)} and no tensors at the top level.",
        )
    optimizer_key = next((key for key in _OPTIMIZER_KEYS if isinstance(content.get(key), Mapping)), None)
    optimizer = content[optimizer_key] if optimizer_key is not None else {}
    facts = {
        str(key): value
        for key, value in content.items()
        if key not in (model_key, optimizer_key) and isinstance(value, (str, int, float, bool))
    }
    order = tuple(int(n) for group in optimizer.get("param_groups", ()) for n in group.get("params", ()))
    moments = {int(number): _slots(state) for number, state in optimizer.get("state", {}).items()}
    return Foreign(weights=weights, moments=moments, order=order, facts=facts)


def _plain_name(name: str) -> str:
    name = _PREFIXES.sub("", name)
    return name.replace(".default.weight", ".weight").replace("magnitude_vector.default", "magnitude_vector")


def _slots(state: Mapping[str, Any]) -> dict[str, Array]:
    return {_SLOTS[slot]: _array(torch.as_tensor(value)) for slot, value in state.items() if slot in _SLOTS}


def _array(tensor: torch.Tensor) -> Array:
    return np.array(tensor.detach().to(torch.float32).numpy())
