"""Describe how llama.cpp stores each model family: the entries of FAMILIES, and the metadata and tensors they give.

Tensor names come from the gguf package. To add a family, add an entry: docs/internals/add-a-gguf-family.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.files.json_fields import check_fields, real, whole
from crosstune.models.llama_layout import CONFIG
from crosstune.models.weights import StoredArray, to_float32

Config = Mapping[str, Any]
Array = NDArray[np.float32]

_COMMON = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
}
_EXPERTS = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_SOFTCAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_GRANITE_SCALES = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_RENAMED = {"num_experts": "num_local_experts", "hidden_activation": "hidden_act"}
_OTHER_FORMAT = (
    "use the format of transformers: export --to hf, serve --engine transformers, push --what merged"
)
_EXPERT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family: its architecture in llama.cpp, and the differences between its folder and llama.cpp's conventions."""

    arch: str
    activation: str = "silu"
    interleaved: bool = False
    """Rows of queries and keys are interleaved, as llama.cpp rotates neighboring rows of a head."""
    norm_offset: float = 0.0
    """Added to the norm weights."""
    norm_eps: tuple[str, str] = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
    numbers: Mapping[str, str] = field(default_factory=dict)
    """Further config keys -> metadata keys, without the architecture."""
    rope: tuple[str, ...] = ("default", "linear", "yarn")
    """The RoPE types that llama.cpp applies."""
    window_every: int = 0
    """llama.cpp's default for the period of full-attention layers, 0 if it ignores a sliding window."""
    needs: Callable[[Config], str] = lambda config: ""
    """Return why llama.cpp would compute the model differently, empty if it does not."""


def _needs_scalar(largest: int) -> Callable[[Config], str]:
    """Check the attention scale of Gemma. llama.cpp derives it from the number of layers."""

    def check(config: Config) -> str:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        expected = hidden // heads if config["num_hidden_layers"] == largest else config["head_dim"]
        found = config.get("query_pre_attn_scalar", expected)
        return "" if found == expected else f"its query_pre_attn_scalar is {found} instead of {expected}"

    return check


def _needs_all_experts(config: Config) -> str:
    if not config.get("norm_topk_prob"):
        return "norm_topk_prob is false, and llama.cpp normalizes the weights of the experts"
    dense = config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1
    return "some of its layers have no experts" if dense else ""


def _needs_rope_steps(config: Config) -> str:
    """Check SmolLM3's layers without RoPE: every fourth."""
    given = config.get("no_rope_layers")
    expected = [int((number + 1) % 4 != 0) for number in range(config["num_hidden_layers"])]
    return "" if given in (None, [], expected) else "its layers without RoPE are not every fourth layer"


def _needs_square_attention(config: Config) -> str:
    width = config["num_attention_heads"] * head_dim(config)
    return "" if width == config["hidden_size"] else f"its attention is {width} wide, not hidden_size"


_LLAMA = Family(arch="llama", interleaved=True, rope=("default", "linear", "yarn", "llama3"))

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": Family(arch="llama", interleaved=True, numbers=_EXPERTS),
    "qwen2": Family(arch="qwen2", needs=_needs_square_attention),
    "qwen3": Family(arch="qwen3"),
    "qwen3_moe": Family(
        arch="qwen3moe",
        numbers={**_EXPERTS, "moe_intermediate_size": "expert_feed_forward_length"},
        needs=_needs_all_experts,
    ),
    "gemma2": Family(
        arch="gemma2",
        activation="gelu_pytorch_tanh",
        norm_offset=1.0,
        numbers=_SOFTCAPS,
        window_every=2,
        needs=_needs_scalar(46),
    ),
    "gemma3_text": Family(
        arch="gemma3",
        activation="gelu_pytorch_tanh",
        norm_offset=1.0,
        numbers=_SOFTCAPS,
        window_every=6,
        needs=_needs_scalar(62),
    ),
    "phi3": Family(arch="phi3", rope=("default", "longrope"), needs=_needs_square_attention),
    "smollm3": Family(arch="smollm3", interleaved=True, needs=_needs_rope_steps),
    "starcoder2": Family(
        arch="starcoder2",
        activation="gelu_pytorch_tanh",
        norm_eps=("norm_epsilon", "attention.layer_norm_epsilon"),
        needs=_needs_square_attention,
    ),
    "granite": Family(
        arch="granite",
        interleaved=True,
        numbers=_GRANITE_SCALES,
        rope=("default", "linear", "yarn", "llama3"),
    ),
}
"""model_type of config.json -> family."""


def unsupported(folder: Path, why: str, *, do: str = _OTHER_FORMAT) -> UserError:
    return UserError(f"The model in {folder} cannot be written as GGUF.", why=f"{why}.", do=do)


def read_family(folder: Path, config: dict[str, Any]) -> tuple[Family, Config]:
    """Return the family of a folder and its config with uniform keys; raise a UserError if it is not supported."""
    config = {_RENAMED.get(key, key): value for key, value in config.items() if value is not None}
    family = FAMILIES.get(config.get("model_type", ""))
    if family is None:
        kinds = ", ".join(sorted(FAMILIES))
        raise unsupported(folder, f"its model_type is {config.get('model_type')!r}, supported: {kinds}")
    rules = {key: whole(1) for key in _COMMON} | {family.norm_eps[0]: real(0)}
    check_fields(config, rules, required=tuple(rules), source=folder / CONFIG)
    reasons = [family.needs(config)]
    if config.get("hidden_act", family.activation) not in (family.activation, "swish"):
        reasons.append(f"its activation is {config['hidden_act']} instead of {family.activation}")
    for kind, rope in _rope(config).items():
        if rope["rope_type"] not in family.rope:
            reasons.append(f"its RoPE is scaled ({rope['rope_type']}), supported: {', '.join(family.rope)}")
        elif kind == "sliding" and rope["rope_type"] != "default":
            reasons.append("the RoPE of its sliding-window layers is scaled")
        if rope.get("partial_rotary_factor", 1.0) != 1.0 and family.arch != "phi3":
            reasons.append("its rotary embedding covers only a part of each head")
    if family.window_every and _window_period(config) is None:
        reasons.append("its full-attention layers are not evenly spaced")
    if any(reasons):
        raise unsupported(folder, "; ".join(filter(None, reasons)))
    return family, config


def ignored_window(family: Family, config: Config) -> int | None:
    """Return the sliding window that llama.cpp does not apply."""
    used = config.get("use_sliding_window", True) and not family.window_every
    return config.get("sliding_window") if used else None


def head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def read_metadata(family: Family, config: Config) -> dict[str, int | float | str]:
    """Return the metadata that describe the model, by key without the architecture."""
    heads, width = config["num_attention_heads"], head_dim(config)
    given = {key: config[name] for name, key in {**_COMMON, **family.numbers}.items() if name in config}
    found: dict[str, int | float | str] = {
        **given,
        family.norm_eps[1]: float(config[family.norm_eps[0]]),
        "attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "attention.key_length": width,
        "attention.value_length": width,
    }
    for kind, rope in _rope(config).items():
        suffix = "_swa" if kind == "sliding" else ""
        found[f"rope.freq_base{suffix}"] = float(rope["rope_theta"])
        if kind == "full":
            found["rope.dimension_count"] = int(rope.get("partial_rotary_factor", 1.0) * width)
            found.update(_scaling(config, rope))
    if family.window_every:
        found["attention.sliding_window"] = config["sliding_window"]
        if (period := _window_period(config)) != family.window_every and period is not None:
            found["attention.sliding_window_pattern"] = period
    elif family.arch == "phi3":
        found["attention.sliding_window"] = config.get("sliding_window") or 0
    return found


def _rope(config: Config) -> dict[str, dict[str, Any]]:
    """Return the RoPE parameters of the full-attention layers, and of the sliding-window layers if they have their own."""
    given: dict[str, Any] = config.get("rope_parameters") or {}
    by_kind: dict[str, dict[str, Any]] = {"full": given.get("full_attention", given)}
    if "sliding_attention" in given:
        by_kind["sliding"] = given["sliding_attention"]
    elif "rope_local_base_freq" in config:
        by_kind["sliding"] = {"rope_theta": config["rope_local_base_freq"]}
    if not given:
        by_kind["full"] = {**(config.get("rope_scaling") or {}), "rope_theta": config.get("rope_theta")}
    if "partial_rotary_factor" in config:
        by_kind["full"] = {"partial_rotary_factor": config["partial_rotary_factor"], **by_kind["full"]}
    defaults = {"rope_type": "default"}
    return {
        kind: defaults
        | ({"rope_type": rope["type"]} if "type" in rope else {})
        | {**rope, "rope_theta": rope.get("rope_theta") or 10000.0}
        for kind, rope in by_kind.items()
    }


def _scaling(config: Config, rope: Mapping[str, Any]) -> Iterator[tuple[str, int | float | str]]:
    kind = rope["rope_type"]
    if kind in ("linear", "yarn", "longrope"):
        yield "rope.scaling.type", kind
    if kind in ("linear", "yarn"):
        yield "rope.scaling.factor", float(rope["factor"])
    if kind == "yarn":
        yield "rope.scaling.original_context_length", _original_context(config, rope)
        for name in ("beta_fast", "beta_slow"):
            if rope.get(name) is not None:
                yield f"rope.scaling.yarn_{name}", float(rope[name])
    if kind == "longrope":
        before = _original_context(config, rope)
        scale = config["max_position_embeddings"] / before
        factor = math.sqrt(1 + math.log(scale) / math.log(before)) if scale > 1 else 1.0
        yield "rope.scaling.original_context_length", before
        yield "rope.scaling.attn_factor", float(rope.get("attention_factor") or factor)


def _original_context(config: Config, rope: Mapping[str, Any]) -> int:
    given = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return int(given or config["max_position_embeddings"])


def _window_period(config: Config) -> int | None:
    """Return the period of full-attention layers, None if there is none."""
    layers = config.get("layer_types")
    if layers is None:
        return int(config.get("sliding_window_pattern") or (2 if config["model_type"] == "gemma2" else 6))
    full = [number for number, kind in enumerate(layers) if kind == "full_attention"]
    period = full[0] + 1 if full else len(layers) + 1
    return period if full == list(range(period - 1, len(layers), period)) else None


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A tensor of a GGUF file; `read` returns its values, with experts in the first dimension."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Array]
    sources: tuple[str, ...] = ()
    """The names of its weights in the folder."""


def plan_tensors(
    folder: Path, family: Family, config: Config, stored: Mapping[str, StoredArray]
) -> list[Planned]:
    """Return the tensors of the file in order; raise a UserError for a weight without a place in it."""
    table = _name_table(family, config)
    planned, unknown = list(_extra_tensors(config)), list[str]()
    for name, sources in _groups(stored).items():
        found = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            unknown.append(sources[0])
            continue
        rule = order_of(family, config, name)
        shape, parts = stored[sources[0]].shape, [stored[source] for source in sources]
        if ".experts." in name and sources[0].rsplit(".", 1)[-1] != "weight":  # fused: (expert, row, column)
            half = None if sources[0].endswith("down_proj") else int(".up_proj" in name)
            shape = shape if half is None else (shape[0], shape[1] // 2, shape[2])
            planned.append(
                Planned(name=found, shape=shape, read=_fused_reader(parts[0], half), sources=sources)
            )
            continue
        shape = (len(parts), *shape) if ".experts." in name else shape
        offset = family.norm_offset if name.endswith("norm.weight") else 0.0
        planned.append(
            Planned(name=found, shape=shape, read=_reader(parts, shape, rule, offset), sources=sources)
        )
    if unknown:
        raise unsupported(folder, f"llama.cpp's {family.arch} models do not have {', '.join(unknown[:3])}")
    return planned


def tensor_name(family: Family, config: Config, layer: str) -> str | None:
    """Return the GGUF name of a linear layer's weight."""
    found: str | None = _name_table(family, config).get_name(f"{layer}.weight", try_suffixes=(".weight",))
    return found


def order_of(family: Family, config: Config, name: str) -> Callable[[Array], Array] | None:
    """Return how the output rows of a weight or bias are reordered, None if they are not."""
    kind = re.search(r"\b([qk])_proj\.", name)
    if not family.interleaved or kind is None:
        return None
    heads = config["num_attention_heads"]
    groups = heads if kind[1] == "q" else config.get("num_key_value_heads") or heads
    return lambda values: _interleaved(values, groups)


def _interleaved(values: Array, heads: int) -> Array:
    """Interleave the rows of queries or keys: llama.cpp applies RoPE to neighboring rows of a head, Hugging Face to its
    two halves."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _name_table(family: Family, config: Config) -> Any:
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == family.arch)
    return get_tensor_name_map(arch, config["num_hidden_layers"])


def _groups(stored: Mapping[str, StoredArray]) -> dict[str, tuple[str, ...]]:
    """Return name -> weights: one weight each, the experts of a projection together, fused gates and ups separately."""
    groups: dict[str, tuple[str, ...]] = {}
    experts: dict[str, dict[int, str]] = {}
    for name in sorted(stored):
        one = re.fullmatch(r"(.*)\.experts\.(\d+)\.(\w+)\.weight", name)
        fused = re.fullmatch(r"(.*)\.experts\.(gate_up_proj|down_proj)", name)
        if one:
            prefix = one[1].replace("block_sparse_moe", "mlp")
            joined = f"{prefix}.experts.{_EXPERT_NAMES.get(one[3], one[3])}.weight"
            experts.setdefault(joined, {})[int(one[2])] = name
        elif fused:
            for part in ("gate_proj", "up_proj") if fused[2] == "gate_up_proj" else ("down_proj",):
                groups[f"{fused[1]}.experts.{part}.weight"] = (name,)
        else:
            groups[name] = (name,)
    return groups | {name: tuple(each[n] for n in sorted(each)) for name, each in experts.items()}


def _fused_reader(part: StoredArray, half: int | None) -> Callable[[], Array]:
    def read() -> Array:
        values = to_float32(*part.read())
        return values if half is None else np.split(values, 2, axis=1)[half]

    return read


def _reader(
    parts: list[StoredArray], shape: tuple[int, ...], order: Callable[[Array], Array] | None, offset: float
) -> Callable[[], Array]:
    def read() -> Array:
        arrays = [to_float32(*part.read()) for part in parts]
        values = arrays[0] if len(shape) == arrays[0].ndim else np.stack(arrays)
        values = values if order is None else order(values)
        return values + np.float32(offset) if offset else values

    return read


def _extra_tensors(config: Config) -> Iterator[Planned]:
    """Yield the RoPE factors of Llama 3 and of long Phi-3 models."""
    rope = _rope(config)["full"]
    factors: dict[str, Any] = {}
    if rope["rope_type"] == "llama3":
        factors["rope_freqs.weight"] = _llama3_factors(rope, head_dim(config))
    elif rope["rope_type"] == "longrope":
        factors["rope_factors_long.weight"] = rope["long_factor"]
        factors["rope_factors_short.weight"] = rope["short_factor"]
    for name, values in factors.items():
        array = np.asarray(values, dtype=np.float32)
        yield Planned(name=name, shape=array.shape, read=lambda array=array: array)  # type: ignore[misc]


def _llama3_factors(rope: Mapping[str, Any], width: int) -> NDArray[np.float64]:
    """Return the divisor of each frequency: 1 for short wavelengths, `factor` for long wavelengths, interpolated in between."""
    frequencies = rope["rope_theta"] ** -(np.arange(0, width, 2) / width)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)
