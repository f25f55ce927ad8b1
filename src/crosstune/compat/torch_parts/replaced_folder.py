"""A quantized model as a folder, safetensors and JSON, and the same model from it, bit for bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from crosstune.compat.torch_parts.layer_storage import (
    LayerStorage,
    describe_stored,
    name_dtype,
    read_dtype,
    restore_stored,
)
from crosstune.compat.torch_parts.replace_layers import HalfLinear, QuantizedLinear, put_module
from crosstune.core.errors import UserError
from crosstune.core.json_files import write_json
from crosstune.torch_engine.adapters import AdaptedLinear
from crosstune.torch_engine.quantized import QuantLinear

FORMAT = 1
DESCRIPTION = "quantization.json"
TENSORS = "quantized.safetensors"
"""Not transformers' name, so that neither takes the other's file for its own."""
_MARK = ".weight."
"""Between a layer's name and that of one of the tensors of its quantized weight."""


def save_quantized(model: nn.Module, folder: Path, *, config: Mapping[str, Any]) -> None:
    """Write a model with its quantized layers; `config` is recorded beside them.

    The description comes last and names the tensors' checksum: a folder without it, or with another one's, is not whole.
    """
    layers = _describe_layers(model)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DESCRIPTION).unlink(missing_ok=True)
    dense, tied = _dense_tensors(model)
    tensors = dense | {
        f"{name}{_MARK}{path}": tensor
        for name in layers
        if isinstance(layer := model.get_submodule(name), QuantizedLinear)
        for path, tensor in layer.stored.tensors().items()
    }
    staged = folder / f".{TENSORS}"
    save_file(_own_memory(tensors), staged, metadata={"format": "pt"})
    staged.replace(folder / TENSORS)
    architecture = _save_architecture(model, folder)
    write_json(
        folder / DESCRIPTION,
        {
            "format": FORMAT,
            "config": config,
            "architecture": architecture,
            "layers": layers,
            "tied": tied,
            "sha256": _checksum(folder / TENSORS),
        },
    )


def read_description(folder: Path) -> dict[str, Any]:
    path = folder / DESCRIPTION
    if not path.is_file():
        raise UserError(
            f"{folder} holds no whole quantized model.",
            why=f"it has no {DESCRIPTION}, which is written last.",
            do="give a folder that save_quantized_model wrote",
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"Cannot read {path}.", why=str(error)) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UserError(f"{path} is not a description that this version can read.", do="save the model again")
    return data


def load_quantized(folder: Path, *, model: nn.Module | None, device: torch.device) -> nn.Module:
    """Fill `model`, a new one of the same architecture, or without one build transformers' model from its config."""
    description = read_description(folder)
    if _checksum(folder / TENSORS) != description["sha256"]:
        raise UserError(
            f"{folder / TENSORS} is not the file that was saved.",
            why=f"its checksum is not the one in {DESCRIPTION}.",
            do="save or copy the model again",
        )
    model = _build(folder, description["architecture"]) if model is None else model
    tensors = load_file(folder / TENSORS, device=str(device))
    for name, layer in description["layers"].items():
        put_module(model, name, _restore(name, layer, tensors, model, device))
    quantized = tuple(f"{name}{_MARK}" for name in description["layers"])
    dense = {name: tensor for name, tensor in tensors.items() if not name.startswith(quantized)}
    _check_names(model, set(dense) | set(description["tied"]), folder)
    model.load_state_dict(dense, strict=False, assign=True)
    for alias, source in description["tied"].items():
        parent, _, child = alias.rpartition(".")
        model.get_submodule(parent)._parameters[child] = model.get_parameter(source)
    return model.to(device)


def _describe_layers(model: nn.Module) -> dict[str, dict[str, Any]]:
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, AdaptedLinear):
            raise UserError(
                f"{name} has an adapter beside its quantized weight.",
                why="this folder is for the base alone.",
                do="save the base before adapters are added, and the adapters as PEFT files",
            )
        if isinstance(module, (QuantizedLinear, HalfLinear)):
            dtype = module.dense_dtype if isinstance(module, QuantizedLinear) else module.kept_in
            found[name] = {
                "shape": [module.out_features, module.in_features],
                "bias": module.bias is not None,
                "dtype": name_dtype(dtype),
                "recipe": module.recipe.to_json(),
                "stored": describe_stored(module.stored) if isinstance(module, QuantizedLinear) else None,
            }
        elif isinstance(module, QuantLinear):
            raise UserError(
                f"{name} was quantized while it was loaded, and does not know its recipe.",
                do="quantize the model with quantize_model of an adapter",
            )
    return found


def _dense_tensors(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Everything that is not quantized, and the names that stand for a parameter saved under another one."""
    first: dict[int, str] = {}
    dense: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, nn.Parameter) and id(tensor) in first:
            tied[name] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        dense[name] = tensor.detach()
    return dense, tied


def _own_memory(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor on the processor in memory of its own, as safetensors asks; libraries share their tables."""
    seen: set[int] = set()
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.cpu().contiguous()
        out[name] = tensor.clone() if tensor.untyped_storage().data_ptr() in seen else tensor
        seen.add(tensor.untyped_storage().data_ptr())
    return out


def _restore(
    name: str,
    layer: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    model: nn.Module,
    device: torch.device,
) -> nn.Module:
    rows, columns = layer["shape"]
    shape = (rows, columns)
    try:
        old = model.get_submodule(name)
    except AttributeError as error:
        raise UserError(
            f"The model to fill has no layer {name}.", do="give one of the saved architecture"
        ) from error
    if not isinstance(old, nn.Linear) or (old.out_features, old.in_features) != shape:
        raise UserError(
            f"{name} of the model to fill is not a linear layer of {shape[0]} x {shape[1]}.",
            do="give a model of the saved architecture that is not quantized yet",
        )
    recipe, dtype = LayerStorage.from_json(layer["recipe"]), read_dtype(layer["dtype"])
    assert dtype is not None
    bias = tensors[f"{name}.bias"] if layer["bias"] else None
    if recipe.spec is None:
        return HalfLinear(torch.empty(shape, dtype=dtype, device=device), bias, recipe=recipe, trained=True)
    start = f"{name}{_MARK}"
    parts = {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
    stored = restore_stored(layer["stored"], parts)
    return QuantizedLinear(stored, bias, recipe=recipe, dtype=dtype)


def _check_names(model: nn.Module, given: set[str], folder: Path) -> None:
    wanted = set(model.state_dict())
    if wanted != given:
        odd = sorted(wanted ^ given)
        raise UserError(
            f"The tensors in {folder} do not fit the model to fill.",
            why=f"{len(wanted - given)} are missing and {len(given - wanted)} too many, such as {odd[0]}.",
            do="give a model of the saved architecture",
        )


def _save_architecture(model: nn.Module, folder: Path) -> str | None:
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return None
    model.config.save_pretrained(folder)
    return type(model).__name__


def _build(folder: Path, architecture: str | None) -> nn.Module:
    import transformers
    from accelerate import init_empty_weights

    kind: Any = None if architecture is None else getattr(transformers, architecture, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise UserError(
            f"The model in {folder} cannot be built from its files.",
            why="it is not one of transformers' models."
            if architecture is None
            else f"the installed transformers has no {architecture}.",
            do="build the model yourself and give it as `model`",
        )
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    with init_empty_weights(include_buffers=False):
        return kind(config).eval()


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
