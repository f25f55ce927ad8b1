"""Check the sizes in a model's config.json before a library builds a model from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstune.core.json_fields import FLAG, NOTHING, OBJECT, TEXT, Rule, check_fields, list_of, real, whole
from crosstune.core.plain_files import UnreadableFile

_SIZE = whole(1, 2**24) | NOTHING
_SIZES = _SIZE | list_of(whole(0, 2**24))
"""One size for all layers, or one for each."""
_LAYERS = whole(1, 10_000) | NOTHING
_TOKENS = whole(1, 2**40) | NOTHING
_TOKEN_IDS = whole(-1, 2**31) | NOTHING | list_of(whole(0, 2**31))

FIELDS: Mapping[str, Rule] = {
    "model_type": TEXT,
    "architectures": list_of(TEXT) | NOTHING,
    "hidden_size": _SIZE,
    "n_embd": _SIZE,
    "d_model": _SIZE,
    "num_hidden_layers": _LAYERS,
    "n_layer": _LAYERS,
    "num_layers": _LAYERS,
    "vocab_size": _SIZE,
    "num_attention_heads": _SIZES,
    "n_head": _SIZES,
    "num_key_value_heads": _SIZES,
    "head_dim": _SIZES,
    "intermediate_size": _SIZES,
    "n_inner": _SIZES,
    "ffn_dim": _SIZES,
    "moe_intermediate_size": _SIZES,
    "num_local_experts": whole(0, 2**16) | NOTHING,
    "num_experts": whole(0, 2**16) | NOTHING,
    "n_routed_experts": whole(0, 2**16) | NOTHING,
    "max_position_embeddings": _TOKENS,
    "n_positions": _TOKENS,
    "sliding_window": whole(0, 2**40) | NOTHING,
    "layer_types": list_of(TEXT) | NOTHING,
    "rms_norm_eps": real(0) | NOTHING,
    "layer_norm_eps": real(0) | NOTHING,
    "rope_theta": real() | NOTHING,
    "rope_scaling": OBJECT | NOTHING,
    "rope_parameters": OBJECT | NOTHING,
    "tie_word_embeddings": FLAG | NOTHING,
    "text_config": OBJECT | NOTHING,
    "quantization_config": OBJECT | NOTHING,
    "dtype": TEXT | NOTHING,
    "torch_dtype": TEXT | NOTHING,
    "bos_token_id": _TOKEN_IDS,
    "eos_token_id": _TOKEN_IDS,
    "pad_token_id": _TOKEN_IDS,
}
_GROUPED = {"bits": whole(1, 64), "group_size": whole(1, 2**20)}
_ADVICE = "download or copy the model's files again"


def check_config(config: Mapping[str, Any], *, path: Path) -> None:
    """Raise UnreadableFile for the first field whose type or size no model has."""
    check_fields(config, FIELDS, source=path, do=_ADVICE)
    inner = config.get("text_config")
    if inner:
        check_fields(inner, FIELDS, source=path, place="text_config.", do=_ADVICE)
    quantization = config.get("quantization")  # MLX's
    if isinstance(quantization, dict) and "group_size" in quantization:
        check_fields(
            quantization, _GROUPED, required=("bits",), source=path, place="quantization.", do=_ADVICE
        )
    for numbers, place in ((config, ""), (inner or {}, "text_config.")):
        _check_heads(numbers, place, path)


def _check_heads(numbers: Mapping[str, Any], place: str, path: Path) -> None:
    """Check that the heads divide the hidden size, unless their size is given."""
    hidden = numbers.get("hidden_size") or numbers.get("n_embd")
    heads = numbers.get("num_attention_heads") or numbers.get("n_head")
    groups = numbers.get("num_key_value_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int):
        return
    if not numbers.get("head_dim") and hidden < heads:
        raise UnreadableFile(
            path,
            f"it has {heads} attention heads at {place}num_attention_heads for {hidden} features",
            do=_ADVICE,
        )
    if isinstance(groups, int) and groups and heads % groups:
        raise UnreadableFile(
            path,
            f"its {heads} attention heads do not divide into {groups} groups ({place}num_key_value_heads)",
            do=_ADVICE,
        )
