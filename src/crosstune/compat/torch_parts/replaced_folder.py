"""Save a model whose layers were replaced as a quantized folder, and load it back bit for bit.

The folder has the layout of `crosstune convert`, so `crosstune train` reads it too. crosstune.json contains the facts
that only this module needs, such as a layer's compute dtype.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from crosstune.compat.quantization_config import dtype_name
from crosstune.compat.torch_parts.replace_layers import (
    HalfLinear,
    LayerStorage,
    QuantizedLinear,
    put_module,
    read_dtype,
)
from crosstune.core.errors import UserError
from crosstune.core.quantization import QuantSpec
from crosstune.files.json_fields import NOTHING, OBJECT, TEXT, check_fields, map_of
from crosstune.files.json_files import read_json, write_json
from crosstune.files.plain_files import file_sha256
from crosstune.models.adapter_files import copy_tokenizer
from crosstune.models.folder import PLAIN_STEM, QUANTIZED_STEM, add_folder_aliases
from crosstune.models.quantized_folder import RECORD
from crosstune.torch_engine.loading.adapters import AdaptedLinear
from crosstune.torch_engine.loading.load import read_config
from crosstune.torch_engine.loading.prequantized import (
    Prequantized,
    own_config,
    read_prequantized,
    write_record,
)
from crosstune.torch_engine.loading.stream import find_tensors, read_tensor
from crosstune.torch_engine.quantized import QuantLinear

DESCRIPTION = "crosstune.json"
_KEY = "replaced_layers"
"""Key of this module's part of the description."""
_FIELDS = {
    "files": map_of(TEXT),
    "layers": map_of(OBJECT),
    "tied": map_of(TEXT),
    "architecture": TEXT | NOTHING,
}
_STORED, _MARK = ".stored.", ".weight."
"""Separators of a layer's name and a tensor of its quantized weight: in the model, and in the folder."""


def save_quantized(model: nn.Module, folder: Path, *, config: Mapping[str, Any]) -> None:
    """Write a model with its quantized layers, and record `config`.

    The description is written last and contains the checksum of the tensors; without it the folder is incomplete.
    """
    layers = _replaced_layers(model)
    quantized = {name: layer for name, layer in layers.items() if isinstance(layer, QuantizedLinear)}
    specs = Counter(layer.recipe.spec for layer in quantized.values())
    spec = specs.most_common(1)[0][0] if specs else None
    if _KEY not in read_json(folder / DESCRIPTION) and any(folder.glob("*.safetensors")):
        raise UserError(
            f"{folder} contains the weights of a different model.",
            why="a reader would mix them with the quantized weights.",
            do="save to a different folder",
        )
    folder.mkdir(parents=True, exist_ok=True)
    tensors, tied = _folder_tensors(model, tuple(f"{name}{_STORED}" for name in quantized))
    target = folder / f"{PLAIN_STEM if spec is None else QUANTIZED_STEM}.safetensors"
    staged = folder / f".{target.name}.part"
    # safetensors requires separate storage, and layers may share theirs.
    copies = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(copies, staged, metadata={"format": "pt"})
    (folder / RECORD).unlink(missing_ok=True)
    for old in folder.glob("*.safetensors"):
        old.unlink()
    staged.replace(target)
    architecture = _save_architecture(model, folder, spec)
    if spec is not None:
        facts = {}
        for name, layer in quantized.items():
            own = layer.recipe.spec
            assert own is not None
            facts[name] = {**layer.stored.facts, **({"spec": own.to_json()} if own != spec else {})}
        dtype = Counter(layer.dense_dtype for layer in quantized.values()).most_common(1)[0][0]
        write_record(folder, spec=spec, dtype=dtype, layers=facts, original=None)
    described = {
        "config": config,
        "architecture": architecture,
        "layers": {name: _describe(layer) for name, layer in layers.items()},
        "tied": tied,
        "files": {target.name: file_sha256(target)},
    }
    write_json(folder / DESCRIPTION, {_KEY: described})


def read_description(folder: Path) -> dict[str, Any]:
    data = read_json(folder / DESCRIPTION).get(_KEY)
    if not isinstance(data, dict):
        raise UserError(
            f"{folder} is not a complete quantized model.",
            why=f"it has no valid {DESCRIPTION}, which is written last.",
            do="pass a folder that save_quantized_model wrote",
        )
    check_fields(data, _FIELDS, required=tuple(_FIELDS), source=folder / DESCRIPTION)
    return data


def load_quantized(folder: Path, *, model: nn.Module | None, device: torch.device) -> nn.Module:
    """Load the folder into `model`, of the same architecture and not quantized; None builds a transformers model."""
    description = read_description(folder)
    for name, checksum in description["files"].items():
        path = folder / name
        if not path.is_file() or file_sha256(path) != checksum:
            raise UserError(
                f"{path} is missing or damaged.",
                why=f"its checksum differs from {DESCRIPTION}.",
                do="save or copy the model again",
            )
    model = _build(folder, description["architecture"]) if model is None else model
    held = read_prequantized(folder) if (folder / RECORD).is_file() else None
    places = find_tensors(folder) if held is None else held.dense
    dense = {name: read_tensor(place).to(device) for name, place in places.items()}
    for name, layer in description["layers"].items():
        put_module(model, name, _restore(name, layer, held, dense, model, device))
    odd = model.load_state_dict(dense, strict=False, assign=True)
    own = (*(f"{name}{_STORED}" for name in description["layers"]), *description["tied"])
    missing = [name for name in odd.missing_keys if not name.startswith(own)]
    if missing or odd.unexpected_keys:
        raise UserError(
            f"The tensors in {folder} do not match the given model.",
            why=f"{len(missing)} are missing and {len(odd.unexpected_keys)} are unexpected, such as "
            f"{[*missing, *odd.unexpected_keys][0]}.",
            do="pass a model of the saved architecture",
        )
    for alias, source in description["tied"].items():
        parent, _, child = alias.rpartition(".")
        model.get_submodule(parent)._parameters[child] = model.get_parameter(source)
    return model.to(device)


def _replaced_layers(model: nn.Module) -> dict[str, QuantizedLinear | HalfLinear]:
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, AdaptedLinear) or hasattr(module, "lora_A"):  # ours, or PEFT's
            raise UserError(
                f"{name} has an adapter.",
                why="the folder contains only the base model.",
                do="save the base before adding adapters, and save the adapters as PEFT files",
            )
        if isinstance(module, (QuantizedLinear, HalfLinear)):
            found[name] = module
        elif isinstance(module, QuantLinear):
            raise UserError(
                f"{name} was quantized while it was loaded, so its storage recipe is not recorded.",
                do="quantize the model with an adapter's quantize_model",
            )
    return found


def _describe(layer: QuantizedLinear | HalfLinear) -> dict[str, Any]:
    dtype = layer.dense_dtype if isinstance(layer, QuantizedLinear) else layer.kept_in
    return {
        "shape": [layer.out_features, layer.in_features],
        "bias": layer.bias is not None,
        "dtype": dtype_name(dtype),
        "recipe": layer.recipe.to_json(),
    }


def _folder_tensors(
    model: nn.Module, quantized: tuple[str, ...]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors by their names in the folder, and tied parameters by the name they are saved under."""
    first: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.startswith(quantized):
            layer, _, part = name.rpartition(_STORED)
            if part != "_extra_state":
                tensors[f"{layer}{_MARK}{part}"] = tensor.detach()
        elif isinstance(tensor, nn.Parameter) and id(tensor) in first:
            tied[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
            tensors[name] = tensor.detach()
    return tensors, tied


def _restore(
    name: str,
    layer: Mapping[str, Any],
    held: Prequantized | None,
    dense: Mapping[str, torch.Tensor],
    model: nn.Module,
    device: torch.device,
) -> nn.Module:
    shape = tuple(layer["shape"])
    old = dict(model.named_modules(remove_duplicate=False)).get(name)
    if not isinstance(old, nn.Linear) or (old.out_features, old.in_features) != shape:
        raise UserError(
            f"The given model has no layer {name} of {shape[0]} x {shape[1]}.",
            do="pass a model of the saved architecture that is not quantized yet",
        )
    recipe, dtype = LayerStorage.from_json(layer["recipe"]), read_dtype(layer["dtype"])
    assert dtype is not None
    bias = dense[f"{name}.bias"] if layer["bias"] else None
    if recipe.spec is None:
        return HalfLinear(torch.empty(shape, dtype=dtype, device=device), bias, recipe=recipe, trained=True)
    assert held is not None, "a folder with quantized layers has a record of them"
    return QuantizedLinear(held.stored(name, device), bias, recipe=recipe, dtype=dtype)


def _save_architecture(model: nn.Module, folder: Path, spec: QuantSpec | None) -> str | None:
    """Write the config of a transformers model, and the tokenizer of the folder it was loaded from."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return None
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    if spec is not None:
        config.quantization_config = own_config(spec)
    config.save_pretrained(folder)
    add_folder_aliases(folder)
    source = Path(model.name_or_path)
    if model.name_or_path and source.is_dir() and source.resolve() != folder.resolve():
        copy_tokenizer(source, folder)
    return type(model).__name__


def _build(folder: Path, architecture: str | None) -> nn.Module:
    import transformers
    from accelerate import init_empty_weights

    kind: Any = None if architecture is None else getattr(transformers, architecture, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise UserError(
            f"The model in {folder} cannot be built from its files.",
            why=f"the installed transformers has no {architecture}."
            if architecture
            else "it is not a model of transformers.",
            do="build the model yourself and pass it as `model`",
        )
    with init_empty_weights(include_buffers=False):
        return kind(read_config(folder)).eval()
