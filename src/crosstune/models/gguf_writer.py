"""Convert the folder of a Llama model to a GGUF file, one tensor at a time, using numpy only."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.files.json_fields import (
    FLAG,
    NOTHING,
    OBJECT,
    TEXT,
    check_fields,
    list_of,
    map_of,
    object_with,
    real,
    whole,
)
from crosstune.files.json_files import read_json, read_object
from crosstune.files.plain_files import read_plain_text
from crosstune.models.folder import read_config_json, weight_files
from crosstune.models.gguf import ARCHITECTURES, require_gguf
from crosstune.models.gguf_metadata import CONTROL, NORMAL, PRE_TOKENIZERS, ROLES, UNUSED, USER_DEFINED
from crosstune.models.llama_layout import CHAT_TEMPLATE, CONFIG
from crosstune.models.staged import Progress, silent
from crosstune.models.weights import stored_arrays, to_float32

if TYPE_CHECKING:
    from gguf import GGUFWriter

KINDS = ("f32", "f16", "bf16", "q8_0")
_NUMBERS = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), whole(1)),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "max_position_embeddings"), whole(1)),
    "rms_norm_eps": real(0),
}
_TOKENIZER = {
    "model": object_with({"vocab": map_of(whole(0)), "merges": list_of(TEXT | list_of(TEXT))}),
    "added_tokens": list_of(object_with({"content": TEXT, "id": whole(0), "special": FLAG})),
    "pre_tokenizer": OBJECT | NOTHING,
}


def write_gguf(folder: Path, path: Path, *, kind: str, progress: Progress = silent) -> None:
    """Write the model of a plain folder as one GGUF file with weights of type `kind`."""
    require_gguf(str(path))
    from gguf import GGML_QUANT_SIZES, GGUFWriter
    from gguf.quants import quantize

    config = read_config_json(folder)
    _check_config(folder, config)
    stored = {name: array for file in weight_files(folder) for name, array in stored_arrays(file).items()}
    if config.get("tie_word_embeddings"):
        stored.pop("lm_head.weight", None)
    names = _gguf_names(folder, sorted(stored), config["num_hidden_layers"])
    writer = GGUFWriter(path, "llama")
    _add_numbers(writer, config, kind)
    _add_tokenizer(writer, folder, num_rows=stored["model.embed_tokens.weight"].shape[0])
    kinds = {name: _tensor_kind(folder, name, stored[name].shape, kind) for name in names}
    sizes: dict[str, int] = {}
    for name, gguf_name in names.items():
        shape = stored[name].shape
        block, block_bytes = GGML_QUANT_SIZES[kinds[name]]
        sizes[name] = math.prod(shape) // block * block_bytes
        writer.add_tensor_info(gguf_name, shape, np.dtype(np.float32), sizes[name], raw_dtype=kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    total, done = sum(sizes.values()), 0
    for name in names:
        values = _interleaved(to_float32(*stored[name].read()), name, config)
        writer.write_tensor_data(np.ascontiguousarray(quantize(values, kinds[name])))
        done += sizes[name]
        progress("write", done, total)
    writer.close()


def can_write_gguf(folder: Path) -> bool:
    """Return True if `write_gguf` supports the model of a folder, by its config and tokenizer."""
    if find_spec("gguf") is None:
        return False
    try:
        _check_config(folder, read_config_json(folder))
        _pre_tokenizer_name(folder, _read_tokenizer(folder))
    except UserError:
        return False
    return True


def _check_config(folder: Path, config: dict[str, Any]) -> None:
    check_fields(config, _NUMBERS, required=tuple(_NUMBERS), source=folder / CONFIG)
    reasons = []
    if config.get("model_type") not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        reasons.append(f"its model_type is {config.get('model_type')!r}, supported: {supported}")
    if "quantization_config" in config:
        reasons.append("its weights are quantized")
    if config.get("attention_bias") or config.get("mlp_bias"):
        reasons.append("its layers have biases")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        reasons.append(f"its RoPE is scaled ({rope.get('rope_type', rope.get('type'))})")
    if reasons:
        raise _unsupported(folder, "; ".join(reasons))


def _unsupported(folder: Path, why: str, *, do: str = "use --to hf and llama.cpp's converter") -> UserError:
    return UserError(f"The model in {folder} cannot be written as GGUF.", why=f"{why}.", do=do)


def _gguf_names(folder: Path, names: list[str], num_layers: int) -> dict[str, str]:
    from gguf import MODEL_ARCH, get_tensor_name_map

    table = get_tensor_name_map(MODEL_ARCH.LLAMA, num_layers)
    found = {name: table.get_name(name, try_suffixes=(".weight",)) for name in names}
    unknown = [name for name, gguf_name in found.items() if gguf_name is None]
    if unknown:
        raise _unsupported(folder, f"Llama models do not have {', '.join(unknown[:3])}")
    return {name: str(gguf_name) for name, gguf_name in found.items()}


def _add_numbers(writer: GGUFWriter, config: dict[str, Any], kind: str) -> None:
    from gguf import GGML_QUANT_VERSION, LlamaFileType

    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"])
    writer.add_quantization_version(GGML_QUANT_VERSION)


def _read_tokenizer(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise _unsupported(folder, "it has no tokenizer.json")
    tokenizer = read_object(path, foreign=True, limit=256 << 20)
    check_fields(tokenizer, _TOKENIZER, required=("model",), source=path)
    return tokenizer


def _add_tokenizer(writer: GGUFWriter, folder: Path, *, num_rows: int) -> None:
    from tokenizers import Tokenizer

    tokenizer = _read_tokenizer(folder)
    model, added = tokenizer["model"], tokenizer.get("added_tokens", [])
    pre = _pre_tokenizer_name(folder, tokenizer)
    ids = {**model["vocab"], **{token["content"]: token["id"] for token in added}}
    by_id = {number: token for token, number in ids.items()}
    marked = {token["id"]: CONTROL if token["special"] else USER_DEFINED for token in added}
    # Embedding rows without a token need a name too.
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([by_id.get(number, f"[PAD{number}]") for number in range(num_rows)])
    writer.add_token_types([marked.get(n, NORMAL if n in by_id else UNUSED) for n in range(num_rows)])
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    )
    settings = read_json(folder / "special_tokens_map.json", foreign=True)
    settings |= read_json(folder / "tokenizer_config.json", foreign=True)
    special: dict[str, int] = {}
    for role, key in ROLES.items():
        token = settings.get(f"{role}_token")
        token = token["content"] if isinstance(token, dict) else token
        if token in ids:
            special[role] = ids[token]
            writer.add_uint32(f"tokenizer.ggml.{key}_token_id", ids[token])
    first = Tokenizer.from_str(json.dumps(tokenizer)).encode("a").ids[:1]
    writer.add_add_bos_token(first == [special.get("bos")])
    jinja = folder / CHAT_TEMPLATE
    template = read_plain_text(jinja, limit=4 << 20) if jinja.is_file() else settings.get("chat_template")
    if template and isinstance(template, str):
        writer.add_chat_template(template)


def _pre_tokenizer_name(folder: Path, tokenizer: dict[str, Any]) -> str:
    """Return llama.cpp's name for the pre-tokenizer; with a wrong name, other programs would split text differently."""
    pre = tokenizer.get("pre_tokenizer") or {}
    parts = (pre.get("pretokenizers") or [{}]) if pre.get("type") == "Sequence" else [pre]
    kinds = [part.get("type") for part in parts]
    byte_level = parts[-1].get("use_regex", True) and not parts[-1].get("add_prefix_space")
    if tokenizer["model"].get("type") == "BPE" and byte_level and tokenizer.get("normalizer") is None:
        if kinds == ["ByteLevel"]:
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits"):
            return "smollm"
    raise _unsupported(
        folder, f"its tokenizer splits text with {kinds}; supported: {', '.join(PRE_TOKENIZERS)}"
    )


def _tensor_kind(folder: Path, name: str, shape: tuple[int, ...], kind: str) -> Any:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    chosen = GGMLQuantizationType[kind.upper() if len(shape) > 1 else "F32"]
    block = GGML_QUANT_SIZES[chosen][0]
    if shape[-1] % block:
        why = f"{kind} needs rows with a multiple of {block} weights, and {name} has {shape[-1]}"
        raise _unsupported(folder, why, do="use --gguf_type f16")
    return chosen


def _interleaved(values: NDArray[np.float32], name: str, config: dict[str, Any]) -> NDArray[np.float32]:
    """Interleave the rows of queries and keys: llama.cpp applies RoPE to neighboring rows of a head, Hugging Face to
    its two halves."""
    heads = config["num_attention_heads"]
    if name.endswith("k_proj.weight"):
        heads = config.get("num_key_value_heads") or heads
    elif not name.endswith("q_proj.weight"):
        return values
    halves = values.reshape(heads, 2, -1, values.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
