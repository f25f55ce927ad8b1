"""Convert a model folder to a GGUF file, one tensor at a time, without a framework."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.core.quantization import GGUF_RECIPES
from crosstune.models import llama_cpp
from crosstune.models.folder import read_config_json, weight_files
from crosstune.models.gguf import ARCHITECTURES, require_gguf
from crosstune.models.gguf_families import (
    Config,
    Family,
    Planned,
    ignored_window,
    order_of,
    plan_tensors,
    read_family,
    read_metadata,
    tensor_name,
    unsupported,
)
from crosstune.models.gguf_metadata import PRE_TOKENIZERS
from crosstune.models.gguf_tokenizer import add_tokenizer, find_kind, read_tokenizer
from crosstune.models.gguf_types import Recipe, encode, size_of
from crosstune.models.staged import Progress, silent
from crosstune.models.weights import stored_arrays

Importance = Mapping[str, NDArray[np.float32]]
"""GGUF name -> a weight for each column."""


def write_gguf(
    folder: Path,
    path: Path,
    *,
    kind: str,
    importance: Importance | None = None,
    types: Mapping[str, str] | None = None,
    similar: Path | None = None,
    progress: Progress = silent,
) -> None:
    """Write the model of a plain folder as one GGUF file of type `kind`; `types` replaces its recipe. Tensors of the same
    type are copied from `similar`, a file of this model with the same `importance`."""
    require_gguf(str(path))
    if kind in GGUF_RECIPES or importance is not None:
        llama_cpp.require_llama_cpp(f"Cannot write {path.name} with {kind} weights.")
    from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType

    family, config, tensors = open_folder(folder)
    writer = GGUFWriter(path, family.arch)
    for key, value in read_metadata(family, config).items():
        _add_value(writer, f"{family.arch}.{key}", value)
    file_type = LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"]
    writer.add_file_type(file_type)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    num_rows = next(tensor.shape[0] for tensor in tensors if tensor.name == "token_embd.weight")
    add_tokenizer(writer, folder, num_rows=num_rows)
    types = types or _choose_types(config, tensors, kind, weighted=importance is not None)
    sizes = {tensor.name: size_of(types[tensor.name], tensor.shape) for tensor in tensors}
    for tensor in tensors:
        raw = GGMLQuantizationType[types[tensor.name]]
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), sizes[tensor.name], raw_dtype=raw
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    total, done = sum(sizes.values()), 0
    stored = {} if similar is None else {tensor.name: tensor for tensor in GGUFReader(similar).tensors}
    for tensor in tensors:
        found = stored.get(tensor.name)
        if found is not None and found.tensor_type.name == types[tensor.name]:
            writer.write_tensor_data(found.data)
        else:
            weights = None if importance is None else importance.get(tensor.name)
            writer.write_tensor_data(
                encode(tensor.read(), types[tensor.name], name=tensor.name, importance=weights)
            )
        done += sizes[tensor.name]
        progress("write", done, total)
    writer.close()


def plan_types(folder: Path, kind: str, *, weighted: bool = False) -> tuple[dict[str, str], dict[str, int]]:
    """Return the type of each tensor in a file of type `kind`, and its bytes."""
    _, config, tensors = open_folder(folder)
    types = _choose_types(config, tensors, kind, weighted=weighted)
    return types, {tensor.name: size_of(types[tensor.name], tensor.shape) for tensor in tensors}


def _choose_types(config: Config, tensors: list[Planned], kind: str, *, weighted: bool) -> dict[str, str]:
    heads = config["num_attention_heads"]
    recipe = Recipe(
        kind=kind,
        num_layers=config["num_hidden_layers"],
        num_experts=config.get("num_local_experts", 1),
        num_groups=heads // (config.get("num_key_value_heads") or heads),
        tied=all(tensor.name != "output.weight" for tensor in tensors),
        weighted=weighted,
    )
    return {tensor.name: recipe.type_of(tensor.name, tensor.shape) for tensor in tensors}


def write_adapter(
    base: Path, path: Path, matrices: Mapping[str, NDArray[np.float32]], settings: Mapping[str, Any]
) -> None:
    """Write a LoRA adapter as a GGUF file for the base model of a folder."""
    require_gguf(str(path))
    from gguf import GGUFWriter

    family, config = read_family(base, read_config_json(base))
    rank = int(settings["r"])
    alpha = float(settings["lora_alpha"]) * (rank**0.5 if settings.get("use_rslora") else 1.0)
    writer = GGUFWriter(path, family.arch)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, values in matrices.items():
        layer, _, part = name.partition(".lora_")
        place = tensor_name(family, config, layer)
        if place is None or part not in ("A.weight", "B.weight"):
            raise unsupported(
                base, f"llama.cpp's {family.arch} models do not have {name}", do="export it merged"
            )
        order = order_of(family, config, f"{layer}.weight") if part == "B.weight" else None
        writer.add_tensor(f"{place}.lora_{part[0].lower()}", values if order is None else order(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def open_folder(folder: Path) -> tuple[Family, Config, list[Planned]]:
    """Return the family, config and GGUF tensors of a folder; raise a UserError if it is not supported."""
    family, config = read_family(folder, read_config_json(folder))
    if "quantization_config" in config:
        raise unsupported(folder, "its weights are quantized")
    stored = {name: array for file in weight_files(folder) for name, array in stored_arrays(file).items()}
    if config.get("tie_word_embeddings", family.arch.startswith("gemma")):
        stored.pop("lm_head.weight", None)
    return family, config, plan_tensors(folder, family, config, stored)


def check_gguf(folder: Path, kind: str) -> list[str]:
    """Raise a UserError if the config or tokenizer of a folder is not supported, or llama.cpp is needed and missing.
    Return warnings."""
    family, config = read_family(folder, read_config_json(folder))
    splitting, warnings = find_kind(folder, read_tokenizer(folder)), []
    if kind in GGUF_RECIPES:
        llama_cpp.require_llama_cpp(f"Cannot write {kind} weights.")
    if not is_readable(folder):
        llama_cpp.require_llama_cpp(
            f"Cannot check a GGUF file of a {config['model_type']} model like {folder}."
        )
    window = ignored_window(family, config)
    if window is not None and window < config["max_position_embeddings"]:
        warnings.append(
            f"llama.cpp does not apply the model's sliding window of {window} tokens: beyond {window} tokens of prompt "
            "and answer, its results differ from the trained model's"
        )
    if splitting.normalizes:
        warnings.append(
            "llama.cpp does not normalize text to Unicode NFC as the tokenizer does: decomposed characters, such as a "
            "letter followed by a combining accent, get different tokens"
        )
    return warnings


def is_readable(folder: Path) -> bool:
    """Return True if crosstune and transformers read the GGUF file of this folder, so that it can be checked without
    llama.cpp: a Llama with plain RoPE, no biases, and a tokenizer that splits text like GPT-2 or SmolLM."""
    _, config = read_family(folder, read_config_json(folder))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return (
        config["model_type"] in ARCHITECTURES
        and not (config.get("attention_bias") or config.get("mlp_bias"))
        and rope.get("rope_type", rope.get("type", "default")) == "default"
        and find_kind(folder, read_tokenizer(folder)).pre in PRE_TOKENIZERS
    )


def can_write_gguf(folder: Path) -> bool:
    """Return True if `write_gguf` supports the model of a folder, judging by its config and tokenizer."""
    if find_spec("gguf") is None:
        return False
    try:
        check_gguf(folder, "auto")
    except UserError:
        return False
    return True


def _add_value(writer: Any, key: str, value: int | float | str) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)
