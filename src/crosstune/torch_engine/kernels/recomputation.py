"""Decide for each fast layer what its backward pass computes again: what was asked for, or what the free memory demands."""

from __future__ import annotations

import torch

from crosstune.config.plan import Plan
from crosstune.core.fast_layers import FastLayer, Recompute, attention_bytes, plan_recomputation
from crosstune.core.memory import fast_working_bytes
from crosstune.torch_engine.kernels.decoder import FastDecoder


def choose_recomputation(decoder: FastDecoder, plan: Plan) -> list[Recompute] | Recompute:
    """Recompute all if the plan says so, otherwise what the free memory of a GPU demands."""
    config, fitted = plan.config, plan.fitted
    if config.use_gradient_checkpointing:
        return "full"
    if decoder.device.type != "cuda":
        return "lean"
    tokens = fitted.step.tokens if fitted is not None else config.batch_size * config.context_length
    return plan_recomputation(
        describe_layer(decoder, length=config.context_length).kept(),
        num_layers=len(decoder.layers),
        num_tokens=tokens,
        free_bytes=_room(decoder, plan),
        working_bytes=fast_working_bytes(fitted.shape, fitted.step) if fitted is not None else 0,
    )


def _room(decoder: FastDecoder, plan: Plan) -> int:
    """Return the memory for kept activations: the free memory, limited to the plan's prediction."""
    free, fitted = free_memory(decoder.device), plan.fitted
    if fitted is None or not fitted.step.limit_bytes:
        return free
    held = torch.get_device_module(decoder.device).memory_allocated(decoder.device)
    return min(free, max(0, fitted.step.limit_bytes - fitted.step.overhead_bytes - held))


def describe_layer(decoder: FastDecoder, *, length: int) -> FastLayer:
    """Return the sizes of a decoder's first layer for rows of this length; all layers have the same."""
    attention, mlp = decoder.layers[0]
    heads, width = attention.heads, decoder.dtype.itemsize
    return FastLayer(
        hidden=mlp.gate_up.num_inputs,
        intermediate=mlp.down.num_inputs,
        queries=heads.num_queries * heads.size,
        keys=heads.num_keys * heads.size,
        num_heads=heads.num_queries,
        qkv_columns=attention.qkv.extra,
        out_columns=attention.out.extra,
        gate_up_columns=mlp.gate_up.extra,
        down_columns=mlp.down.extra,
        compute_bytes=width,
        stream_bytes=decoder.inner.embed_tokens.weight.element_size(),
        attention_bytes=attention_bytes(length, compute_bytes=width, on_gpu=decoder.device.type != "cpu"),
        qk_norms=attention.qk_norms is not None,
        post_norms=mlp.post_norm is not None,
    )


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a GPU, with what torch has cached."""
    module = torch.get_device_module(device)
    return int(module.mem_get_info(device)[0] + module.memory_reserved() - module.memory_allocated())
