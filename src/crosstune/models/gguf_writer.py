"""Convert a model folder to a GGUF file, one tensor at a time, without a framework.

The type of each tensor follows the rules of llama.cpp's recipes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.core.quantization import GGUF_BLOCKS as BLOCKS
from crosstune.core.quantization import GGUF_PLAIN as PLAIN
from crosstune.core.quantization import GGUF_RECIPES as RECIPES
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
from crosstune.models.staged import Progress, silent
from crosstune.models.weights import stored_arrays

_FALLBACKS = {"IQ4_XS": "IQ4_NL", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""For rows that are not a multiple of 256 weights."""
_LARGEST_HALF = 65504.0
_IN_HALF = {"F32", "BF16"}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named type of a GGUF file, and the facts of the model that its rules use."""

    kind: str
    num_layers: int
    num_experts: int = 1
    num_groups: int = 1
    """Attention heads that share a key."""
    tied: bool = False
    weighted: bool = False
    """An importance matrix is used."""

    def type_of(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the type of a tensor by its GGUF name."""
        if len(shape) < 2 or "_norm" in name or "ffn_gate_inp" in name or not name.endswith("weight"):
            return "F32"
        if self.kind in PLAIN:
            return self.kind.upper()
        if name == "output.weight" or (self.tied and name == "token_embd.weight"):
            fits = self.kind in RECIPES and not shape[-1] % 256
            return _fallback("Q6_K" if fits else "Q8_0", shape[-1])
        found = RECIPES.get(self.kind, self.kind.upper())
        return _fallback(self._rule(name, found), shape[-1])

    def _rule(self, name: str, found: str) -> str:
        """Apply llama.cpp's rules: more bits for values and for the second half of the feed-forward layers, in the first
        and last eighth of the layers and every third between them."""
        match = re.match(r"blk\.(\d+)\.(\w+)\.", name)
        if match is None:
            return found
        layer, part, eight = int(match[1]), match[2], self.num_experts == 8
        more = _use_more_bits(layer, self.num_layers)
        if part in ("attn_v", "attn_qkv"):
            large = self.num_layers == 80 and self.num_groups > 1
            if self.kind == "q3_k_m":
                found = "Q5_K" if layer < 2 else "Q4_K"
            elif self.kind == "iq4_xs" and self.num_groups >= 4:
                found = "Q5_K"
            elif self.kind in ("q4_k_m", "q5_k_m") and more:
                found = "Q6_K"
            if large and found in ("Q3_K", "Q4_K"):
                found = "Q5_K"
            return "Q8_0" if eight and self.kind in RECIPES else found
        if part == "attn_k" and eight and self.kind in RECIPES:
            return "Q8_0"
        if part.startswith("ffn_down"):
            if self.kind == "q3_k_m":
                return "Q5_K" if layer < self.num_layers // 16 else "Q4_K"
            if self.kind in ("q4_k_m", "q5_k_m") and more:
                return "Q6_K"
            if self.kind == "iq4_xs" and layer < self.num_layers // 8 and not self.weighted:
                return "Q5_K"
        if part == "attn_output":
            if eight and self.kind in ("q3_k_m", "q4_k_m", "iq4_xs"):
                return "Q5_K"
            return "Q4_K" if self.kind == "q3_k_m" else found
        return found


def _use_more_bits(layer: int, num_layers: int) -> bool:
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _fallback(found: str, width: int) -> str:
    """Return a type whose blocks divide rows of `width` weights."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    for each in (found, _FALLBACKS.get(found, "F16"), "F16"):
        if width % GGML_QUANT_SIZES[GGMLQuantizationType[each]][0] == 0:
            return each
    raise AssertionError(found)


def size_of(kind: str, shape: Iterable[int]) -> int:
    """Return the bytes of a tensor."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return math.prod(shape) // block * block_bytes


def encode(
    values: NDArray[np.float32], kind: str, *, name: str, importance: NDArray[np.float32] | None = None
) -> NDArray[Any]:
    """Return a tensor's values in a type; raise a UserError if they are not finite or too large for it."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    largest = float(np.abs(values).max(initial=0.0))  # a NaN stays
    if not math.isfinite(largest):
        raise _cannot(name, kind, "it has NaN or infinite weights", do="use an earlier checkpoint")
    if kind not in _IN_HALF and largest > _LARGEST_HALF:
        why = f"its largest weight is {largest:.3g}, beyond the range of fp16, which {kind.lower()} uses"
        raise _cannot(name, kind, why, do="use --gguf_type bf16")
    chosen = GGMLQuantizationType[kind]
    by_gguf = kind in ("F32", "F16", "BF16") or (importance is None and kind.lower() in BLOCKS)
    if by_gguf:
        return np.ascontiguousarray(quantize(values, chosen))
    row_bytes = size_of(kind, values.shape[-1:])
    if values.ndim == 3:
        weights = importance if importance is not None else [None] * len(values)
        rows = [
            llama_cpp.quantize_rows(each, chosen, row_bytes, weight)
            for each, weight in zip(values, weights, strict=True)
        ]
        return np.stack(rows)
    return llama_cpp.quantize_rows(values, chosen, row_bytes, importance)


def _cannot(name: str, kind: str, why: str, *, do: str) -> UserError:
    return UserError(f"The tensor {name} cannot be written as {kind.lower()}.", why=f"{why}.", do=do)


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
    adds_bos: bool = True,
    progress: Progress = silent,
) -> None:
    """Write the model of a plain folder as one GGUF file of type `kind`; `types` replaces its recipe. Tensors of the same
    type are copied from `similar`, a file of this model with the same `importance`. Unless `adds_bos`, llama.cpp adds no BOS
    token to prompts."""
    require_gguf(str(path))
    if kind in RECIPES or importance is not None:
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
    add_tokenizer(writer, folder, num_rows=num_rows, adds_bos=adds_bos)
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
    if kind in RECIPES:
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
