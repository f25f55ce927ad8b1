"""Choose between the fast layers and transformers' own for a model that is about to be trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from crosstune.config.plan import Plan
from crosstune.torch_engine.adapters import Adapted
from crosstune.torch_engine.kernels.calibrate import leave_out_of_fp8
from crosstune.torch_engine.kernels.decoder import FastDecoder
from crosstune.torch_engine.kernels.find_parts import why_general, why_other_adapters
from crosstune.torch_engine.kernels.fp8_weights import why_no_fp8
from crosstune.torch_engine.kernels.pass_graphs import PassGraphs
from crosstune.torch_engine.kernels.recomputation import (
    LayerBytes,
    Recompute,
    free_memory,
    layer_bytes,
    plan_recomputation,
)
from crosstune.torch_engine.precision import Precision


def warn_of_general(model: Any, *, plan: Plan) -> list[str]:
    """Return a warning if a model cannot use the fast layers that the plan has."""
    reason = why_general(model) if plan.config.kernels == "fast" else None
    return [f"kernels: the general layers are used, since {reason}"] if reason else []


def open_decoder(
    model: Any,
    adapters: Mapping[str, Adapted],
    *,
    plan: Plan,
    precision: Precision,
    device: torch.device,
) -> FastDecoder | None:
    """Return the fast decoder over a model's modules, or None where the general path is used."""
    if plan.config.kernels != "fast" or why_general(model) or why_other_adapters(adapters):
        return None
    dtype = precision.autocast or precision.weights
    asked = plan.config.base_precision == "fp8" or plan.quantizer == "fp8"
    refused = why_no_fp8(device, dtype) if asked else None
    decoder = FastDecoder(
        model,
        dtype=dtype,
        recompute=choose_recomputation(model, plan, dtype, device),
        fp8=asked and refused is None,
    )
    left_out = leave_out_of_fp8(decoder, seed=plan.config.seed)
    decoder.notes = describe_decoder(decoder, refused=refused, left_out=left_out)
    return decoder


def describe_decoder(
    decoder: FastDecoder, *, refused: str | None, left_out: Sequence[tuple[str, float]]
) -> list[str]:
    """Return sentences about what memory and a first pass decided."""
    notes = []
    if refused is not None:
        notes.append(f"base_precision: products are computed in {decoder.dtype}, since {refused}")
    if left_out:
        name, error = left_out[0]
        notes.append(
            f"base_precision: {len(left_out)} of {len(decoder.groups())} groups of layers do not multiply in fp8, such as "
            f"{name}, whose products were off by {error:.0%}"
        )
    if num_full := decoder.recompute.count("full"):
        notes.append(f"kernels: {num_full} of {len(decoder.layers)} layers are recomputed to save memory")
    return notes


def choose_recomputation(
    model: Any, plan: Plan, dtype: torch.dtype, device: torch.device
) -> list[Recompute] | Recompute:
    """Recompute all if the user asked for it, otherwise what the free memory demands."""
    config = plan.config
    if config.use_gradient_checkpointing and (
        "use_gradient_checkpointing" in config.asked or config.low_memory or device.type != "cuda"
    ):
        return "full"
    if device.type != "cuda":
        return "lean"
    return plan_recomputation(
        _layer_bytes(model, dtype),
        num_layers=model.config.num_hidden_layers,
        num_tokens=config.batch_size * config.context_length,
        free_bytes=free_memory(device),
    )


def open_graphs(
    decoder: FastDecoder | None, parameters: Sequence[nn.Parameter], *, plan: Plan
) -> PassGraphs | None:
    """Return the graphs of captured passes, if the plan asks for them and the layers can be captured."""
    if not plan.config.cuda_graphs or decoder is None or decoder.device.type != "cuda":
        return None
    if "full" in decoder.recompute or plan.config.use_activation_cpu_offload:
        return None
    cost = _layer_bytes(decoder.model, decoder.dtype)
    return PassGraphs(parameters, bytes_per_token=sum(getattr(cost, mode) for mode in decoder.recompute))


def _layer_bytes(model: Any, dtype: torch.dtype) -> LayerBytes:
    return layer_bytes(
        model.config,
        head_size=model.model.layers[0].self_attn.head_dim,
        compute_bytes=dtype.itemsize,
        stream_bytes=model.model.embed_tokens.weight.element_size(),
    )
