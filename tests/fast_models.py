"""Small models of each family of the fast layers, with adapters, and their losses and gradients both ways."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import transformers as hf

from crosstune.core.quantization import QuantSpec
from crosstune.models.adapter_choice import AdapterSettings
from crosstune.torch_engine.kernels.decoder import FastDecoder
from crosstune.torch_engine.loading.adapters import Adapted, add_adapters
from crosstune.torch_engine.quantized import QuantLinear, quantize_weight

VOCABULARY = 97
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "initializer_range": 0.08,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**SHAPE),
    "llama, biases, tied head": lambda: hf.LlamaConfig(
        **SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama, a window that it does not use": lambda: hf.LlamaConfig(**SHAPE, sliding_window=8),
    "llama, one head per key": lambda: hf.LlamaConfig(**SHAPE | {"num_key_value_heads": 4}),
    "mistral, window": lambda: hf.MistralConfig(**SHAPE, sliding_window=8),
    "qwen2, windows in some layers": lambda: hf.Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "qwen3, QK norms": lambda: hf.Qwen3Config(**SHAPE, head_dim=24),
    "gemma": lambda: hf.GemmaConfig(**SHAPE, head_dim=24),
    "gemma2 without caps": lambda: hf.Gemma2Config(
        **SHAPE,
        head_dim=24,
        sliding_window=8,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attn_implementation="eager",
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **SHAPE,
        head_dim=24,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi3, half of each head rotated": lambda: hf.Phi3Config(
        **SHAPE, partial_rotary_factor=0.5, sliding_window=8
    ),
}


def settings(rank: int = 8, *, dropout: float = 0.0, dora: bool = False) -> AdapterSettings:
    return AdapterSettings(rank=rank, alpha=16, dropout=dropout, rank_stabilized=False, magnitudes=dora)


def make_model(
    name: str, *, rank: int = 8, targets: str = "all", **changed: Any
) -> tuple[Any, dict[str, Adapted]]:
    """Return a model of a configuration with some fields `changed`, and its adapters; none of them computes zero."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.update(changed)
    model = hf.AutoModelForCausalLM.from_config(config)
    for part, parameter in model.named_parameters():
        if "norm" in part or part.endswith("bias"):
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    adapters = add_adapters(model, targets=targets, settings=settings(rank), seed=0)
    for adapter in adapters.values():
        adapter.lora_B.data.normal_(0, 0.1)
    return model, adapters


@lru_cache(maxsize=1)
def make_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids, and the indices and targets of the supervised tokens: those of the second half of each row."""
    torch.manual_seed(1)
    rows = torch.cat([torch.arange(10, 20), torch.arange(28, 40)])
    return torch.randint(3, VOCABULARY, (2, 20)), rows, torch.randint(0, VOCABULARY, (len(rows),))


def general_loss(model: Any, positions: torch.Tensor | None) -> torch.Tensor:
    ids, rows, targets = make_rows()
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1)[rows], targets, reduction="sum")


def fast_loss(decoder: FastDecoder, positions: torch.Tensor | None) -> torch.Tensor:
    ids, rows, targets = make_rows()
    return decoder.loss(decoder.hidden(ids, positions=positions, rows=rows), targets)


def gradients(loss: torch.Tensor, adapters: dict[str, Adapted]) -> dict[str, torch.Tensor]:
    for adapter in adapters.values():
        adapter.zero_grad()
    loss.backward()
    return {
        f"{name}.{part}": parameter.grad.clone()
        for name, adapter in adapters.items()
        for part, parameter in adapter.trained().items()
        if parameter.grad is not None
    }


def quantize_base(adapters: dict[str, Adapted], spec: QuantSpec) -> None:
    for adapter in adapters.values():
        base: Any = adapter.base
        bias = base.bias.detach() if base.bias is not None else None
        adapter.base = QuantLinear(quantize_weight(base.weight.detach(), spec, torch.float32), bias)
