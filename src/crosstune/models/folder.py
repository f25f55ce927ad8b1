"""Check a model folder in the Hugging Face layout, read its shape, and write its config.json for all readers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.estimate.fast_layers import why_no_fast_layers_of
from crosstune.estimate.model_shape import ModelShape
from crosstune.estimate.tower import read_tower
from crosstune.estimate.vision_families import TEXT_DEFAULTS, is_projector, is_tower, vision_family
from crosstune.files.json_fields import (
    FLAG,
    NOTHING,
    OBJECT,
    TEXT,
    Rule,
    check_fields,
    list_of,
    map_of,
    real,
    whole,
)
from crosstune.files.json_files import finite, read_json, read_object, write_json
from crosstune.files.plain_files import UnreadableFile, check_regular_files
from crosstune.files.safetensors_header import read_header
from crosstune.models.llama_layout import CONFIG, Llama

PLAIN_STEM, QUANTIZED_STEM = "model", "quantized"
"""Stems of weight file names. transformers loads the first; files that it would misread use the second."""
INDEXES = tuple(f"{stem}.safetensors.index.json" for stem in (PLAIN_STEM, QUANTIZED_STEM))
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
_SETTINGS = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
"""Other files that libraries read."""
_MAX_WEIGHTS_PER_BYTE = 16
_SPARE_WEIGHTS = 10_000_000
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names for the number of experts in config.json."""
_SIZE = whole(1, 2**24) | NOTHING
_SIZES = _SIZE | list_of(whole(0, 2**24))
"""One size for all layers, or one for each."""
_POSITIONS = Rule(
    "an object with finite numbers, and a factor that is not 0",
    lambda value: isinstance(value, dict) and finite(value) == value and value.get("factor") != 0,
)
_TOKEN_IDS = whole(-1, 2**31) | NOTHING | list_of(whole(0, 2**31))

_FIELDS: Mapping[str, Rule] = {
    "model_type": TEXT,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "vocab_size"), _SIZE),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "head_dim"), _SIZES),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size"), _SIZES),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), whole(1, 10_000) | NOTHING),
    **dict.fromkeys(EXPERT_COUNTS, whole(0, 2**16) | NOTHING),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), whole(1, 2**40) | NOTHING),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _TOKEN_IDS),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps"), real(0) | NOTHING),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _POSITIONS | NOTHING),
    **dict.fromkeys(("text_config", "quantization_config"), OBJECT | NOTHING),
    **dict.fromkeys(("architectures", "layer_types"), list_of(TEXT) | NOTHING),
    **dict.fromkeys(("dtype", "torch_dtype"), TEXT | NOTHING),
    "sliding_window": whole(0, 2**40) | NOTHING,
    "rope_theta": real() | NOTHING,
    "tie_word_embeddings": FLAG | NOTHING,
}
_GROUPED = {"bits": whole(1, 64), "group_size": whole(1, 2**20)}
_ADVICE = "download or copy the model's files again"


def check_folder(folder: Path) -> None:
    """Raise a UserError unless the folder contains a complete model."""
    check_regular_files(folder)
    if not (folder / CONFIG).is_file():
        raise _no_config(folder)
    config = read_config_json(folder)
    for name in _SETTINGS:
        read_json(folder / name, foreign=True)
    files = weight_files(folder)
    if not files:
        raise _no_weights(folder)
    absent = sorted(_indexed_files(folder) - {path.name for path in files})
    if absent:
        raise UserError(
            f"The model folder {folder} is not complete.",
            why=f"its index lists missing weight files: {', '.join(absent)}.",
            do="download or copy the missing files",
        )
    for path in files:
        read_header(path)
    shape, num_bytes = config_shape(config), sum(path.stat().st_size for path in files)
    if shape is not None and shape.num_parameters > _MAX_WEIGHTS_PER_BYTE * num_bytes + _SPARE_WEIGHTS:
        raise UnreadableFile(  # a library would allocate a model far larger than its files
            folder / CONFIG,
            f"its sizes imply about {shape.num_parameters:,} weights, and the weight files have {num_bytes:,} bytes",
            do=_ADVICE,
        )
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(
            f"The model folder {folder} has no tokenizer.",
            do="copy the model's tokenizer.json and tokenizer_config.json into the folder",
        )


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def read_config_json(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json after checking its sizes."""
    config = read_object(folder / CONFIG, foreign=True)
    check_config(config, path=folder / CONFIG)
    return config


def folder_shape(folder: Path) -> ModelShape | None:
    """Return the shape of a model folder; None if config.json lacks the sizes."""
    config = read_config_json(folder)
    shape = config_shape(config)
    files = weight_files(folder)
    if shape is None or not files or "quantization_config" in config:
        return shape
    sizes = {
        name: math.prod(entry["shape"]) for path in files for name, entry in read_header(path).tensors.items()
    }
    if shape.tower is not None:
        family = vision_family(config)
        projector = sum(size for name, size in sizes.items() if is_projector(name, family))
        own = sum(size for name, size in sizes.items() if is_tower(name, family))
        tower = replace(shape.tower, num_parameters=own + projector, projector=projector)
        shape = replace(shape, tower=tower, tied=shape.tied or "lm_head.weight" not in sizes)
    return replace(shape, num_parameters=sum(sizes.values()))


def longest_context(folder: Path) -> int | None:
    """Return the model's maximum context length; None if config.json does not specify it."""
    shape = config_shape(read_config_json(folder)) if (folder / CONFIG).is_file() else None
    return (shape.max_context or None) if shape is not None else None


def config_shape(config: dict[str, Any]) -> ModelShape | None:
    """Return the shape described by a config.json, with parameters counted as for a Llama model."""
    numbers: dict[str, Any] = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    numbers = TEXT_DEFAULTS.get(str(config.get("model_type")), {}) | numbers
    hidden = _first(numbers, "hidden_size", "n_embd", "d_model")
    layers = _first(numbers, "num_hidden_layers", "n_layer", "num_layers")
    vocab = _first(numbers, "vocab_size")
    if hidden is None or layers is None or vocab is None:
        return None
    heads = _first(numbers, "num_attention_heads", "n_head") or 1
    llama = Llama(
        vocab=vocab,
        hidden=hidden,
        intermediate=_first(numbers, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_first(numbers, "num_key_value_heads") or heads,
        head_dim=_first(numbers, "head_dim") or hidden // heads,
        max_context=_longest_row(numbers),
        tied=bool(config.get("tie_word_embeddings", False)),
    )
    family = str(config.get("model_type") or "")
    shape = replace(llama.shape(), family=family, why_general=why_no_fast_layers_of(config) or "")
    tower = read_tower(config)
    if tower is not None:
        counted = shape.num_parameters + tower.num_parameters
        shape = replace(shape, tower=tower, num_parameters=counted)
    experts = _first(numbers, *EXPERT_COUNTS) or 1
    width = _first(numbers, "moe_intermediate_size") or llama.intermediate
    if experts > 1:
        gained = layers * 3 * hidden * (experts * width - llama.intermediate)
        active = _first(numbers, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k") or 2
        shape = replace(
            shape,
            num_parameters=shape.num_parameters + gained,
            num_experts=experts,
            expert_intermediate=width,
            experts_per_token=min(active, experts),
        )
    return shape


def _longest_row(numbers: dict[str, Any]) -> int:
    """Return the maximum context; `dynamic` positions go beyond max_position_embeddings."""
    found = _first(numbers, "max_position_embeddings", "n_positions") or 0
    rope = numbers.get("rope_parameters") or numbers.get("rope_scaling") or {}
    factor = rope.get("factor") if "dynamic" in (rope.get("rope_type"), rope.get("type")) else None
    return int(found * factor) if isinstance(factor, (int, float)) and 1 <= factor <= 2**20 else found


def check_config(config: Mapping[str, Any], *, path: Path) -> None:
    """Raise UnreadableFile for the first field with an impossible type or size."""
    check_fields(config, _FIELDS, source=path, do=_ADVICE)
    inner = config.get("text_config")
    if inner:
        check_fields(inner, _FIELDS, source=path, place="text_config.", do=_ADVICE)
    quantization = config.get("quantization")  # the key that MLX uses
    if isinstance(quantization, dict) and "group_size" in quantization:
        check_fields(
            quantization, _GROUPED, required=("bits",), source=path, place="quantization.", do=_ADVICE
        )
    for numbers, place in ((config, ""), (inner or {}, "text_config.")):
        _check_heads(numbers, place, path)


def _check_heads(numbers: Mapping[str, Any], place: str, path: Path) -> None:
    hidden = numbers.get("hidden_size") or numbers.get("n_embd")
    heads = numbers.get("num_attention_heads") or numbers.get("n_head")
    groups = numbers.get("num_key_value_heads") or heads
    if not isinstance(hidden, int) or not isinstance(heads, int) or not isinstance(groups, int):
        return
    if heads % groups or (hidden < heads and not numbers.get("head_dim")):
        why = f"{heads} heads at {place}num_attention_heads do not match {hidden} features and {groups} kv heads"
        raise UnreadableFile(path, why, do=_ADVICE)


def _no_config(folder: Path) -> UserError:
    if (folder / "adapter_config.json").is_file():
        return UserError(f"{folder} is an adapter, not a model.", do="specify the adapter's base model")
    return UserError(
        f"{folder} is not a model folder.",
        why=f"it has no {CONFIG}.",
        do=f"specify a folder with {CONFIG}, *.safetensors and the tokenizer files",
    )


def _no_weights(folder: Path) -> UserError:
    names = sorted(path.name for path in folder.iterdir())
    if found := [name for name in names if name.endswith(_PICKLES)]:
        why = f"its weights are pickles ({', '.join(found[:3])}), which can run code when they are loaded."
        do = (
            "save the model as safetensors (transformers' `save_pretrained`), or download a version with them"
        )
    elif found := [name for name in names if name.endswith(".npz")]:
        why = f"its weights are in {found[0]}, the format of early MLX releases."
        do = "convert the original model again: crosstune convert MODEL --to mlx --n_bits 4"
    elif found := [name for name in names if name.endswith(".gguf")]:
        why, do = "it contains a GGUF file.", f"specify the file itself: {folder / found[0]}"
    else:
        why, do = "it has no *.safetensors file.", "download or copy the model's weights into it"
    return UserError(f"The model folder {folder} has no usable weights.", why=why, do=do)


def _indexed_files(folder: Path) -> set[str]:
    """Return the names of the weight files that an index lists."""
    found: set[str] = set()
    for path in (folder / name for name in INDEXES):
        if path.is_file():
            index = read_object(path, foreign=True)
            check_fields(index, {"weight_map": map_of(TEXT)}, required=("weight_map",), source=path)
            found.update(index["weight_map"].values())
    return found


def _first(numbers: dict[str, Any], *keys: str) -> int | None:
    """Return the first of these fields that is set; for a list of sizes per layer, the largest."""
    for key in keys:
        found = numbers.get(key)
        if isinstance(found, list):
            found = max(found, default=None)
        if isinstance(found, int):
            return found
    return None


_EXPERT_NAMES = ("num_experts", "num_local_experts")
_DERIVED_HEADS = ("qwen3_moe",)
"""Types whose head size is hidden_size / num_attention_heads unless it is given, and that mlx-lm reads only with it."""


def add_config_aliases(config: dict[str, Any]) -> dict[str, Any]:
    """Add the names that transformers 4 and mlx-lm read to the names of transformers 5. With the newer names alone, other
    readers fail or use defaults silently."""
    return {**_spell_positions(config), **_spell_windows(config), **_spell_sizes(config), **config}


def _spell_positions(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict):
        return {}
    older: dict[str, Any] = {}
    local = rope.get("sliding_attention")
    if isinstance(local, dict) and "rope_theta" in local:
        older["rope_local_base_freq"] = local["rope_theta"]
    whole = rope.get("full_attention", rope)
    if isinstance(whole, dict) and "rope_theta" in whole:
        older["rope_theta"] = whole["rope_theta"]
        older["rope_scaling"] = whole if whole.get("rope_type", "default") != "default" else None
        if "partial_rotary_factor" in whole:
            older["partial_rotary_factor"] = whole["partial_rotary_factor"]
        if config.get("model_type") == "gpt_neox":
            older["rotary_emb_base"] = whole["rope_theta"]
            older["rotary_pct"] = whole.get("partial_rotary_factor", 0.25)
    return older


def _spell_sizes(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    experts = next((config[name] for name in _EXPERT_NAMES if config.get(name) is not None), None)
    if experts is not None:
        found |= dict.fromkeys(_EXPERT_NAMES, experts)
    if config.get("model_type") in _DERIVED_HEADS and config.get("hidden_size"):
        found["head_dim"] = config["hidden_size"] // config.get("num_attention_heads", 1)
    if config.get("model_type") == "gpt2" and "n_positions" in config:
        found["n_ctx"] = config["n_positions"]
    return found


def _spell_windows(config: dict[str, Any]) -> dict[str, Any]:
    """Return the older `sliding_window_pattern` if every n-th layer has full attention."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or "full_attention" not in kinds or "sliding_attention" not in kinds:
        return {}
    every = kinds.index("full_attention") + 1
    regular = all(
        (kind == "full_attention") == ((place + 1) % every == 0) for place, kind in enumerate(kinds)
    )
    return {"sliding_window_pattern": every} if regular and every > 1 else {}


def add_folder_aliases(folder: Path) -> None:
    write_json(folder / CONFIG, add_config_aliases(read_config_json(folder)))
