"""Options for the model, the training method and the quantized base."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from crosstune.config.conditions import (
    ADAPTER_METHODS,
    LOSSES,
    SFT,
    TORCH_ENGINE,
    TRAIN_TYPE_PARTS,
    Condition,
)
from crosstune.config.option import OnResume, StringKind, option
from crosstune.config.options.rl import RL_LOSSES
from crosstune.core.names import plugin_names
from crosstune.core.quantization import quantizer_names

ADAPTERS = Condition("lora or dora", lambda now: now["method"] in ADAPTER_METHODS)
LLAMA_PRO = Condition("llama_pro", lambda now: now["method"] == "llama_pro")
BLOCKS_TO_ADD = Condition(
    "", lambda now: not now["llama_pro_path"], "with --llama_pro_path: its model is already expanded"
)
QUANTIZED_BASE = Condition("a quantized base", lambda now: now["scheme"] is not None)
QUANTIZING_TRAIN_TYPE = Condition(
    "a train type that quantizes", lambda now: TRAIN_TYPE_PARTS[now["train_type"]][1] != "none"
)
ROPE_SCALING = Condition("`--rope_scaling`", lambda now: now["rope_scaling"] != "none")
SCALES_BY_GROUP = Condition(
    "",
    lambda now: now["scheme"] is not None and now["n_bits"] not in now["scheme"].bits_by_row,
    "with {quantizer} and {n_bits} bits: they use one scale per row",
)
DOUBLE_QUANT = Condition(
    "",
    lambda now: now["scheme"] is not None and now["n_bits"] in now["scheme"].bits_with_double_quant,
    "with {quantizer} and {n_bits} bits",
)
MLX_ENGINE = Condition(
    "",
    lambda now: now["engine"] == "mlx",
    "on memory or compilation outside the MLX engine; its other settings apply",
)
FP8_BASE = Condition("`--base_precision fp8`", lambda now: now["base_precision"] == "fp8")

ROPE_KINDS = ("linear", "dynamic", "yarn", "llama3")
"""Values of --rope_scaling."""
_adapter = partial(option, needs=(ADAPTERS,))


_LAYERS = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")


def layer_numbers(value: str) -> frozenset[int] | None:
    """Return the numbers in a list such as 0,1,4-7; None if it is not such a list."""
    found: set[int] = set()
    for part in value.split(","):
        if (match := _LAYERS.fullmatch(part.strip())) is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            return None
        found |= set(range(first, last + 1))
    return frozenset(found)


def _check_layers(value: str) -> str | None:
    return None if layer_numbers(value) else "layer numbers from 0, such as 0,1,2 or 0-7"


def _check_tokens(value: str) -> str | None:
    tokens = value.split(",")
    if all(tokens) and len({*tokens}) == len(tokens) and not any(token != token.strip() for token in tokens):
        return None
    return "different tokens separated by commas, without spaces, such as <think>,</think>"


def _quantizer_names() -> Sequence[str]:
    return ("auto", "none", *quantizer_names())


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    recipe: str = option(
        "sft",
        "Kind of training",
        choices=partial(plugin_names, "crosstune.recipes"),
        instead={name: f"--recipe preference --preference_loss {name}" for name in LOSSES}
        | {name: f"--recipe rl --rl_loss {name}" for name in RL_LOSSES},
        on_resume=OnResume.MAY_CHANGE_DATA,
    )
    train_type: str = option(
        "lora",
        "Training method; qlora and types with bnb or hqq in their name quantize the frozen base; llama_pro needs torch",
        choices=tuple(TRAIN_TYPE_PARTS),
        on_resume=OnResume.TRAINABLE | OnResume.QUANTIZATION,
    )
    base_precision: str = _adapter(
        "auto",
        "Matmul precision for the frozen base; fp8 also stores an unquantized base in 8 bits; auto: --precision",
        choices=("auto", "fp8"),
        needs=(ADAPTERS, TORCH_ENGINE),
        on_resume=OnResume.QUANTIZATION,
    )
    fp8_tolerance: float = _adapter(
        0.0025,
        "Maximum KL divergence, in nats per token, between the base in fp8 and the unquantized base, measured before "
        "training: the worst layer groups are not converted; 0: convert all layers",
        high=100,
        needs=(ADAPTERS, TORCH_ENGINE, FP8_BASE),
        on_resume=OnResume.QUANTIZATION,
    )
    lora_rank: int = _adapter(16, "Rank of the adapters", low=1, high=2**16, on_resume=OnResume.ADAPTER)
    lora_alpha: float = _adapter(
        32, "Scaling of the adapters: alpha / rank", high=1e6, on_resume=OnResume.ADAPTER
    )
    lora_dropout: float = _adapter(0.0, "Dropout on adapter inputs", high=1)
    lora_target_modules: str = _adapter(
        "all",
        "Layers with an adapter: all (linear layers and experts), attention, default (query and value), a "
        "comma-separated list of names, or a regex for full names",
        on_resume=OnResume.ADAPTER,
        joins_items="",
    )
    layers_to_transform: str | None = _adapter(
        None,
        "Numbers of the layers with adapters, from 0, such as 0,1,2 or 0-7; all layers if not set",
        on_resume=OnResume.ADAPTER,
        check=_check_layers,
        joins_items="",
    )
    init_lora: str = _adapter(
        "default",
        "Initialization of the adapters: default (A random, B zero), orthogonal (A and B random, with B A = 0), pissa (from the largest "
        "singular values of each weight, which are subtracted from the base), or loftq (from the quantization error; torch only)",
        choices=("default", "orthogonal", "pissa", "loftq"),
        on_resume=OnResume.ADAPTER,
    )
    modules_to_save: str | None = _adapter(
        None,
        "Comma-separated names of modules to train in full next to the adapters, such as embed_tokens, lm_head or norm; "
        "saved with the adapter",
        on_resume=OnResume.ADAPTER,
        joins_items="",
    )
    train_router: bool = _adapter(
        False,
        "Train the routers of a mixture of experts in full next to the adapters, and save them with the adapter",
        on_resume=OnResume.ADAPTER,
    )
    train_vision_tower: bool = option(
        False,
        "Train the tower that reads pictures too: with adapters on its layers, or in full with --train_type full",
        on_resume=OnResume.ADAPTER,
        needs=(SFT, TORCH_ENGINE),
    )
    train_projector: bool = option(
        False,
        "Train the projector from the tower to the language model in full; it is saved with the adapter",
        on_resume=OnResume.ADAPTER,
        needs=(SFT, TORCH_ENGINE),
    )
    add_tokens: str | None = option(
        None,
        "Tokens to add to the tokenizer: a comma-separated list, or a .txt file with one per line. Embedding and output head get one new "
        "row per token, initialized with the mean of the other rows, and are trained in full",
        on_resume=OnResume.ADAPTER,
        check=_check_tokens,
        joins_items="",
        reads_lines=True,
        longest=2**16,
    )
    rope_scaling: str = option(
        "none",
        "Scale the rotary positions of the model for rows longer than it was trained for: linear, dynamic (NTK), yarn or llama3 (with "
        "the frequency factors 1 and 4 of Llama 3.1); merged and exported models contain it, an adapter alone does not",
        choices=("none", *ROPE_KINDS),
        on_resume=OnResume.ADAPTER,
    )
    rope_factor: float | None = option(
        None,
        "Factor of --rope_scaling: the longest row divided by the longest row that the model was trained for",
        low=1,
        high=1024,
        needs=(ROPE_SCALING,),
        on_resume=OnResume.ADAPTER,
    )
    use_rslora: bool = _adapter(
        False,
        "Scale adapters by alpha / sqrt(rank) instead of alpha / rank (rsLoRA)",
        on_resume=OnResume.ADAPTER,
    )
    loraplus_lr_ratio: float = _adapter(
        1, "Learning rate of B divided by the learning rate of A (LoRA+)", high=1e6
    )
    num_new_blocks: int = option(
        1,
        "Number of blocks to add, spread evenly across the model",
        low=1,
        high=1000,
        needs=(LLAMA_PRO, BLOCKS_TO_ADD),
        on_resume=OnResume.NEW_BLOCKS,
    )
    quantization_backend: str = option(
        "auto",
        "Quantization library for the frozen base",
        choices=_quantizer_names,
        on_resume=OnResume.QUANTIZATION,
    )
    n_bits: int = option(
        4,
        "Bits per weight in the quantized base",
        low=1,
        high=32,
        needs=(QUANTIZED_BASE,),
        on_resume=OnResume.QUANTIZATION,
    )
    group_size: int = option(
        64,
        "Weights per quantization scale",
        aliases=("hqq_group_size",),
        low=1,
        high=2**20,
        needs=(QUANTIZED_BASE, SCALES_BY_GROUP),
        on_resume=OnResume.QUANTIZATION,
    )
    quant_type: str = option(
        "auto",
        "Data type of the quantized base: nf4 or fp4 (bnb), int or float8 (quanto); auto: the library's default",
        choices=("auto", "nf4", "fp4", "int", "float8"),
        needs=(TORCH_ENGINE, QUANTIZED_BASE),
        on_resume=OnResume.QUANTIZATION,
    )
    double_quant: bool = option(
        True,
        "Quantize the scales as well (bnb, 4 bits)",
        needs=(TORCH_ENGINE, QUANTIZED_BASE, DOUBLE_QUANT),
        on_resume=OnResume.QUANTIZATION,
    )
    no_4bit: bool = option(
        False,
        "Do not quantize the base, regardless of --train_type",
        needs=(QUANTIZING_TRAIN_TYPE,),
        on_resume=OnResume.QUANTIZATION,
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    model_name: str = option(
        "smollm2-135m",
        "Model to train: a bundled name, a folder, a .gguf file, or a hub id",
        aliases=("model",),
        holds=StringKind.PATH,
        on_resume=OnResume.MODEL,
    )
    base_adapter: str | None = option(
        None, "Folder of an adapter to start from", needs=(ADAPTERS,), holds=StringKind.PATH
    )
    tokenizer: str | None = option(
        None,
        "Folder with the tokenizer to use instead of the model's",
        holds=StringKind.PATH,
        on_resume=OnResume.MAY_CHANGE_DATA,
    )
    llama_pro_path: str | None = option(
        None,
        "Folder of an already expanded model, named ..._blk_exp-OLD-NEW; replaces model_name",
        needs=(LLAMA_PRO,),
        holds=StringKind.PATH,
        on_resume=OnResume.MODEL,
    )
    mlx_config: str | None = option(
        None,
        "JSON or YAML file with settings for the MLX engine",
        needs=(MLX_ENGINE,),
        holds=StringKind.PATH,
        on_resume=OnResume.TRAINABLE,
    )
