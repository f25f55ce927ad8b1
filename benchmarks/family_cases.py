"""The shapes of current model families for `families_gpu.py`, and how each is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A shape of a model, and how it is trained."""

    kind: str
    """The class of the configuration."""
    sizes: dict[str, Any]
    rows: int
    context: int = 2048
    options: dict[str, Any] = field(default_factory=dict)
    """Options of crosstune."""
    targets: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"])
    """The linear layers of PEFT's adapters."""
    parameters: list[str] | None = None
    """The stacks of PEFT's adapters."""
    contenders: tuple[str, ...] = ("ours", "peft")


COMMON = {"pad_token_id": 0, "max_position_embeddings": 8192}
_TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "head_dim": 16,
}
_LORA = {"train_type": "lora", "use_gradient_checkpointing": True}
_QLORA = {"train_type": "qlora", "use_gradient_checkpointing": True}
CASES = {
    "qwen3-moe": Case(
        kind="Qwen3MoeConfig",
        sizes={
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "vocab_size": 151936,
        },
        rows=4,
        options=_QLORA | {"quantization_backend": "bnb"},
        parameters=EXPERTS,
        contenders=("ours", "peft", "unsloth"),
    ),
    "gpt-oss": Case(
        kind="GptOssConfig",
        sizes={
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "vocab_size": 201088,
        },
        rows=1,
        options=_QLORA | {"quantization_backend": "mxfp4"},
        parameters=EXPERTS,
        contenders=("ours",),
    ),
    "qwen3.5": Case(
        kind="Qwen3_5TextConfig",
        sizes={
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "vocab_size": 248320,
            "tie_word_embeddings": True,
        },
        rows=4,
        options=_LORA,
        targets=[
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
            "in_proj_qkv",
            "in_proj_z",
            "in_proj_a",
            "in_proj_b",
            "out_proj",
        ],
    ),
    "granite4": Case(  # the micro size of Granite 4.0 H
        kind="GraniteMoeHybridConfig",
        sizes={
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "shared_intermediate_size": 8192,
            "num_local_experts": 0,
            "num_hidden_layers": 40,
            "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "mamba_n_heads": 64,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "vocab_size": 100352,
            "tie_word_embeddings": True,
        },
        rows=2,
        options=_LORA,
        contenders=("ours",),
    ),
    "nemotron-h": Case(  # a part of Nemotron 3 Nano: a mixture of experts without gates, Mamba-2 and attention
        kind="NemotronHConfig",
        sizes={
            "hidden_size": 2688,
            "intermediate_size": 1856,
            "layers_block_type": (["mamba", "moe"] * 3 + ["attention", "moe"]) * 3,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "vocab_size": 131072,
        },
        rows=2,
        options=_QLORA | {"quantization_backend": "bnb"},
        contenders=("ours",),
    ),
    "falcon-h1": Case(  # Falcon-H1 3B
        kind="FalconH1Config",
        sizes={
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 32,
            "num_attention_heads": 10,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_d_ssm": 4096,
            "mamba_n_heads": 32,
            "mamba_d_head": 128,
            "mamba_d_state": 256,
            "vocab_size": 65537,
        },
        rows=2,
        options=_LORA,
        contenders=("ours",),
    ),
    "lfm2": Case(  # LFM2 1.2B
        kind="Lfm2Config",
        sizes={
            "hidden_size": 2048,
            "intermediate_size": 12288,
            "num_hidden_layers": 16,
            "layer_types": [
                "full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)
            ],
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        rows=4,
        options=_LORA,
        contenders=("ours",),
    ),
}
_TINY_EXPERTS = {"intermediate_size": 64, "moe_intermediate_size": 64, "num_key_value_heads": 2}
_TINY_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "shared_intermediate_size": 64}
SMOKE: dict[str, dict[str, Any]] = {
    "qwen3-moe": _TINY | _TINY_EXPERTS | {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt-oss": _TINY | {"intermediate_size": 64, "num_key_value_heads": 2, "num_local_experts": 4},
    "qwen3.5": _TINY
    | {
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "granite4": _TINY
    | _TINY_MAMBA
    | {"layer_types": ["mamba", "attention"], "num_key_value_heads": 2, "num_local_experts": 0},
    "nemotron-h": _TINY
    | _TINY_EXPERTS
    | {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "moe", "attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 64,
    },
    "falcon-h1": _TINY
    | _TINY_MAMBA
    | {"mamba_d_ssm": 128, "num_key_value_heads": 2, "intermediate_size": 128},
    "lfm2": _TINY | {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2},
}
