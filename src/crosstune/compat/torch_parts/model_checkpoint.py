"""Save and load any torch model and optimizer in crosstune's checkpoint format, for custom training loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from crosstune.checkpoint.read import open_checkpoint
from crosstune.checkpoint.tensors import word_of
from crosstune.checkpoint.write import write_folder
from crosstune.compat.torch_parts.replace_layers import QuantizedLinear
from crosstune.core.atomic_files import put_in_place, staging_folder
from crosstune.core.errors import UserError
from crosstune.core.protocols import SessionState
from crosstune.torch_engine import state as states

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def save_model_checkpoint(
    model: nn.Module,
    path: Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint folder at `path` atomically; an existing checkpoint is replaced once the new one is complete.

    Quantized layers are part of the model's state dict: packed bits, scales, and a description of both.
    """
    facts = dict(metadata or {})
    _check_plain(facts)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    dtypes = [_NAMES.get(p.dtype, str(p.dtype)) for p in model.parameters() if p.is_floating_point()]
    weights = {name: states.to_host(tensor) for name, tensor in model.state_dict().items()}
    moments = states.export_moments(optimizer, dict(model.named_parameters())) if optimizer else {}
    state = SessionState(weights=weights, moments=moments, random=states.export_random(device))
    fields = {
        "step": int(facts.get("global_step", facts.get("step", 0))),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "engine": "torch",
        "backend": device.type,
        "precision": max(set(dtypes), key=dtypes.count) if dtypes else "fp32",
        "quantization": _quantization_name(model),
        "identity": {},
        "trainable": {n: {"dtype": word_of(a), "shape": list(a.shape)} for n, a in weights.items()},
        "schedule": {},
        "data": {},
        "facts": {},
        "progress": {},
        "metadata": facts,
    }
    return _replace(path, state, fields)


def load_model_checkpoint(
    model: nn.Module,
    path: Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    strict: bool = True,
) -> dict[str, Any]:
    """Load a checkpoint into a model and an optimizer. Return its metadata, step, backend, precision, quantization.

    Without `strict`, weights that only the model or only the checkpoint has are left out; shapes must match anyway.
    """
    found = open_checkpoint(path)
    state, own = found.load(), model.state_dict()
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in state.weights.items()}
    differing = [name for name in own if name in tensors and not _fits(name, tensors[name], own[name])]
    if strict:
        differing += sorted(own.keys() ^ tensors.keys())
    if differing or not own.keys() & tensors.keys():
        names = f"{differing[0]} is missing or has another shape" if differing else "they share no weight"
        raise UserError(f"{path} is not a checkpoint of this model.", why=f"{names}.")
    model.load_state_dict(tensors, strict=strict)
    if optimizer is not None:
        states.import_moments(optimizer, dict(model.named_parameters()), state.moments)
    states.import_random(next((p.device for p in model.parameters()), torch.device("cpu")), state.random)
    manifest = found.manifest
    described = {name: manifest[name] for name in ("step", "backend", "precision", "quantization")}
    return described | dict(manifest.get("metadata") or {})


def _fits(name: str, tensor: torch.Tensor, own: torch.Tensor) -> bool:
    """Return whether the shapes match. A quantized weight's description may have any length: its layer checks it."""
    return name.endswith("_extra_state") or tensor.shape == own.shape


def _quantization_name(model: nn.Module) -> str | None:
    """Return the most common quantization of the layers, such as `hqq-4bit`."""
    layers = (module for module in model.modules() if isinstance(module, QuantizedLinear))
    names = Counter(layer.recipe.spec.name() for layer in layers if layer.recipe.spec is not None)
    return names.most_common(1)[0][0] if names else None


def _replace(path: Path, state: SessionState, fields: Mapping[str, Any]) -> Path:
    if not path.exists():
        write_folder(path, state, fields)
        return path
    open_checkpoint(path, hashes=False)  # never replace a folder that is not a checkpoint
    with staging_folder(path) as staging:
        write_folder(staging / "new", state, fields)
        put_in_place(staging / "new", path, aside=staging / "old")
    return path


def _check_plain(facts: Mapping[str, Any]) -> None:
    for name, value in facts.items():
        if not isinstance(value, (str, int, float, bool, list, dict, type(None))):
            raise UserError(
                f"'{name}' cannot be saved in a checkpoint.",
                why=f"JSON has no {type(value).__name__}.",
                do="pass a number, a string, a list or a dict",
            )
