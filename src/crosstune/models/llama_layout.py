"""Define a Llama model folder: sizes, parameter names, config and tokenizer files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.estimate.model_shape import ModelShape
from crosstune.files.json_files import write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
CHAT_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True, kw_only=True)
class Llama:
    """The contents of a Llama model's config.json."""

    vocab: int
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool
    max_context: int = 0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    dtype: str = "float32"
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter by its Hugging Face name."""
        hidden, queries, keys = self.hidden, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (hidden,)
            shapes[prefix + "self_attn.q_proj.weight"] = (queries, hidden)
            shapes[prefix + "self_attn.k_proj.weight"] = (keys, hidden)
            shapes[prefix + "self_attn.v_proj.weight"] = (keys, hidden)
            shapes[prefix + "self_attn.o_proj.weight"] = (hidden, queries)
            shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
            shapes[prefix + "mlp.gate_proj.weight"] = (self.intermediate, hidden)
            shapes[prefix + "mlp.up_proj.weight"] = (self.intermediate, hidden)
            shapes[prefix + "mlp.down_proj.weight"] = (hidden, self.intermediate)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, hidden)
        return shapes

    def shape(self) -> ModelShape:
        return ModelShape(
            num_parameters=sum(math.prod(shape) for shape in self.tensor_shapes().values()),
            hidden=self.hidden,
            num_layers=self.num_layers,
            intermediate=self.intermediate,
            vocab=self.vocab,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            tied=self.tied,
            max_context=self.max_context,
            family="llama",
        )

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "max_position_embeddings": self.max_context,
            "rms_norm_eps": self.norm_eps,
            # transformers 4 and mlx-lm read `rope_theta`, transformers 5 reads `rope_parameters`.
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": self.tied,
            "initializer_range": 0.02,
            "use_cache": True,
            "dtype": self.dtype,
            **self.token_ids(),
        }

    def token_ids(self) -> dict[str, int | None]:
        return {"bos_token_id": self.bos, "eos_token_id": self.eos, "pad_token_id": self.pad}


def write_configs(folder: Path, llama: Llama) -> None:
    write_json(folder / CONFIG, llama.config())
    known = {key: value for key, value in llama.token_ids().items() if value is not None}
    write_json(folder / "generation_config.json", {"_from_model_config": True, **known})


def write_tokenizer(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    special: dict[str, str | None],
    chat_template: str | None,
    max_context: int,
) -> None:
    """Save a tokenizer so that transformers, PEFT and mlx-lm load it. `special` maps bos, eos, unk, pad to tokens."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        # This class uses tokenizer.json unchanged; Llama's own class replaces the pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_context,
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": token for role, token in special.items() if token is not None},
    }
    if chat_template is not None:
        (folder / CHAT_TEMPLATE).write_text(chat_template, encoding="utf-8")
    write_json(folder / "tokenizer_config.json", settings)
