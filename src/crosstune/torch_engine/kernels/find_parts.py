"""Find the parts of a transformers model that the fast decoder layers need, or say why they cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from crosstune.estimate.fast_layers import ACTIVATIONS, why_no_fast_layers
from crosstune.torch_engine.kernels.operations import Heads, Norm
from crosstune.torch_engine.loading.adapters import AdaptedLinear, AdaptedStack, DoraLinear

_WINDOW_IN_CONFIG = ("mistral", "phi3")
"""Families whose layers take their window from the config; others keep it in a layer, or have none whatever the config says."""


def why_general(model: Any) -> str | None:
    """Return why a model cannot use the fast layers, from its config and classes; None if it can."""
    config = getattr(model, "config", None)
    if reason := why_no_fast_layers(lambda name: getattr(config, name, None)):
        return reason
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        return "its output head is not a plain matrix"
    return None


def why_other_adapters(adapters: Mapping[str, Any]) -> str | None:
    """Return why adapters cannot use the fast layers."""
    if not adapters:
        return "there are no adapters: the fast layers train nothing else"
    for name, adapter in adapters.items():
        if isinstance(adapter, (DoraLinear, AdaptedStack)):
            return "the fast layers have no DoRA and no experts"
        if adapter.dropout:
            return "the fast layers have no dropout on adapters"
        if not isinstance(adapter, AdaptedLinear) or ".layers." not in name:
            return f"the fast layers do not reach the adapter {name}"
    return None


def activation_kind(config: Any) -> str:
    return ACTIVATIONS[getattr(config, "hidden_activation", None) or config.hidden_act]


def read_norm(norm: Any) -> Norm:
    """Return the weight and settings of an RMSNorm module."""
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return Norm(norm.weight.detach(), eps, offset=1.0 if type(norm).__name__.startswith("Gemma") else 0.0)


def read_heads(attention: Any, config: Any, *, rotary: int) -> Heads:
    return Heads(
        num_queries=config.num_attention_heads,
        num_keys=config.num_key_value_heads,
        size=attention.head_dim,
        rotary=rotary,
    )


def qkv_layers(attention: Any) -> list[nn.Module]:
    """Return the layers that make queries, keys and values, in this order; Phi-3 has one for all."""
    if hasattr(attention, "qkv_proj"):
        return [attention.qkv_proj]
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def gate_up_layers(mlp: Any) -> list[nn.Module]:
    return [mlp.gate_up_proj] if hasattr(mlp, "gate_up_proj") else [mlp.gate_proj, mlp.up_proj]


def mlp_norms(layer: Any) -> tuple[Any, Any, Any]:
    """Return the norms after attention, before the MLP and after it. Where the first and last are None, the one named
    after attention stands before the MLP."""
    if hasattr(layer, "pre_feedforward_layernorm"):
        return (
            layer.post_attention_layernorm,
            layer.pre_feedforward_layernorm,
            layer.post_feedforward_layernorm,
        )
    return None, layer.post_attention_layernorm, None


def layer_window(config: Any, attention: Any, index: int) -> int | None:
    """Return the number of tokens that a layer's attention sees; None for all."""
    if hasattr(attention, "sliding_window"):
        window: int | None = attention.sliding_window
        return window
    if config.model_type not in _WINDOW_IN_CONFIG:
        return None
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[index] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)
