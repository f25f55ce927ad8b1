"""Choose between the fast layers and the layers of transformers, fp8 and dense matmuls, and the recomputation of each layer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from crosstune.config.resolve.plan import Plan
from crosstune.core.errors import UserError
from crosstune.core.quantization import BaseChoice
from crosstune.estimate.fast_layers import (
    HOST_SHARE,
    LONG_ROW,
    FastLayer,
    Recompute,
    attention_bytes,
    plan_recomputation,
    why_no_fast_layers,
)
from crosstune.estimate.memory import fast_working_bytes
from crosstune.process.ranks import Group
from crosstune.torch_engine.device import Precision
from crosstune.torch_engine.experts import AdaptedStack
from crosstune.torch_engine.kernels.calibrate_fp8 import (
    Fp8Exclusions,
    choose_fp8_exclusions,
    restore_dense_layers,
)
from crosstune.torch_engine.kernels.decoder import FastDecoder
from crosstune.torch_engine.kernels.fp8_weights import why_no_fp8
from crosstune.torch_engine.kernels.operations import has_triton
from crosstune.torch_engine.loading.adapters import Adapted, AdaptedLinear, DoraLinear


def open_decoder(
    model: Any,
    adapters: Mapping[str, Adapted],
    *,
    plan: Plan,
    precision: Precision,
    device: torch.device,
    folder: Path | None,
    group: Group | None = None,
) -> tuple[FastDecoder | None, BaseChoice | None, list[str]]:
    """Return the model's fast decoder (None for the general layers), the form chosen for the base, and notes for the user.

    A recorded choice is kept; otherwise rank 0 of a group chooses for all.
    """
    if plan.config.kernels != "fast":
        return None, decide_base(plan), []
    reason, notes = find_reason(model, adapters, plan=plan, device=device)
    dtype = precision.autocast or precision.weights
    wants_fp8 = plan.config.base_precision == "fp8" or plan.quantizer == "fp8"
    refused = why_no_fp8(device, dtype) if wants_fp8 and reason is None else None
    base, left_out = decide_base(plan), Fp8Exclusions()
    undecided = wants_fp8 and (base is None or base.outside_fp8 is None)
    is_first = group is None or group.ranks.first
    if undecided and not is_first:
        base = share_base(base, group)
        kept = base.kept if base is not None else ()
        restore_dense_layers(model, kept, dtype=dtype, device=device, folder=folder)
    decoder = None
    if reason is None:
        in_fp8 = wants_fp8 and refused is None
        outside = base.outside_fp8 if base is not None and in_fp8 else None
        decoder = FastDecoder(model, dtype=dtype, fp8=in_fp8, outside_fp8=outside or ())
        if unknown := sorted(set(decoder.outside_fp8) - decoder.groups().keys()):
            raise UserError(
                f"The checkpoint keeps {unknown[0][:200]} out of fp8, but this model has no such layer group.",
                do="use the version of crosstune that wrote it, or --kernels general",
            )
    if undecided and is_first:
        if decoder is not None and refused is None:
            left_out = choose_fp8_exclusions(
                decoder,
                # A resumed run keeps the weights of its base.
                folder=folder if plan.base is None else None,
                tolerance=plan.config.fp8_tolerance,
                seed=plan.config.seed,
            )
            kept = left_out.kept if plan.base is None else plan.base.kept
            base = BaseChoice(quantizer=plan.quantizer, kept=kept, outside_fp8=left_out.names)
        base = share_base(base, group)
    if decoder is None:
        return None, base, notes
    decoder.set_recomputation(choose_recomputation(decoder, plan))
    if (
        plan.config.use_activation_cpu_offload
        and device.type != "cpu"
        and _host_holds_attention(decoder, plan)
    ):
        decoder.keeps_from = LONG_ROW
    return decoder, base, describe_decoder(decoder, refused=refused, left_out=left_out)


def _host_holds_attention(decoder: FastDecoder, plan: Plan) -> bool:
    """Return True if host memory has room for the input and the attention of each layer."""
    tokens = plan.config.batch_size * plan.config.context_length
    each = (
        2
        * tokens
        * decoder.layers[0][1].gate_up.num_inputs
        * decoder.inner.embed_tokens.weight.element_size()
    )
    return len(decoder.layers) * each <= HOST_SHARE * psutil.virtual_memory().available


def decide_base(plan: Plan) -> BaseChoice | None:
    """Return the recorded form of the base. Without a record, weights in fp8 stay in fp8."""
    if plan.base is None and plan.quantizer == "fp8":
        return BaseChoice(quantizer="fp8")
    return plan.base


def share_base(base: BaseChoice | None, group: Group | None) -> BaseChoice | None:
    """Return the choice of the group's rank 0."""
    if group is None:
        return base
    fields = json.loads(group.broadcast(json.dumps(asdict(base) if base is not None else None)))
    lists = {name: tuple(value) for name, value in (fields or {}).items() if isinstance(value, list)}
    return BaseChoice(**fields | lists) if fields is not None else None


def find_reason(
    model: Any, adapters: Mapping[str, Adapted], *, plan: Plan, device: torch.device
) -> tuple[str | None, list[str]]:
    """Return why `--kernels fast` falls back to the general layers, and notes; a reason already in a warning is not repeated."""
    chosen = plan.has_chosen("kernels")
    reason = why_general(model)
    if reason is not None:
        return reason, describe_general(reason) if chosen else []
    reason = why_other_adapters(adapters)
    if reason is None and chosen and device.type != "cpu" and not has_triton():
        reason = "their kernels need Triton, which is not installed"
    return reason, describe_general(reason)


def warn_of_general(model: Any, *, plan: Plan) -> list[str]:
    """Return a warning if the user requested the fast layers and the model cannot use them."""
    if plan.config.kernels != "fast" or plan.has_chosen("kernels"):
        return []
    return describe_general(why_general(model))


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
    """Return why adapters cannot use the fast layers; None if they can."""
    if not adapters:
        return "there are no adapters, and the fast layers train only adapters"
    for name, adapter in adapters.items():
        if isinstance(adapter, (DoraLinear, AdaptedStack)):
            return "the fast layers do not support DoRA or experts"
        if adapter.dropout:
            return "the fast layers do not support adapter dropout"
        if not isinstance(adapter, AdaptedLinear) or ".layers." not in name:
            return f"the fast layers do not cover the adapter {name}"
    return None


def describe_general(reason: str | None) -> list[str]:
    """Return a note if there is a reason for the general layers."""
    return [f"kernels: the general layers are used, since {reason}"] if reason else []


def choose_recomputation(decoder: FastDecoder, plan: Plan) -> list[Recompute] | Recompute:
    """Return the recomputation of each layer: everything with --use_gradient_checkpointing, otherwise as the memory of a
    GPU requires."""
    config, fitted = plan.config, plan.fitted
    if config.use_gradient_checkpointing:
        return "full"
    if decoder.device.type != "cuda":
        return "lean"
    module = torch.get_device_module(decoder.device)
    allocated = module.memory_allocated(decoder.device)
    free = int(module.mem_get_info(decoder.device)[0] + module.memory_reserved() - module.memory_allocated())
    if fitted is not None and fitted.step.limit_bytes:
        free = min(free, max(0, fitted.step.limit_bytes - fitted.step.overhead_bytes - allocated))
    tokens = fitted.step.tokens if fitted is not None else config.batch_size * config.context_length
    return plan_recomputation(
        describe_layer(decoder, length=config.context_length).kept(),
        num_layers=len(decoder.layers),
        num_tokens=tokens,
        free_bytes=free,
        working_bytes=fast_working_bytes(fitted.shape, fitted.step) if fitted is not None else 0,
    )


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


def describe_decoder(decoder: FastDecoder, *, refused: str | None, left_out: Fp8Exclusions) -> list[str]:
    """Return notes about fp8 and recomputation."""
    notes = []
    if refused is not None:
        notes.append(f"base_precision: matmuls are computed in {decoder.dtype}, since {refused}")
    if left_out.names:
        still = sum(stacked.in_fp8 for stacked in decoder.groups().values())
        notes.append(
            f"base_precision: {len(left_out.names)} of {still + len(left_out.names)} layer groups are kept out of fp8, such as "
            f"{left_out.names[0]}; the divergence from the original weights falls from {left_out.before:.2g} to "
            f"{left_out.after:.2g} nats per token (--fp8_tolerance)"
        )
    elif decoder.outside_fp8:
        notes.append(
            f"base_precision: {len(decoder.outside_fp8)} layer groups stay out of fp8, as chosen when the run began; "
            "--fp8_tolerance is ignored when resuming"
        )
    if num_full := decoder.recompute.count("full"):
        notes.append(f"kernels: {num_full} of {len(decoder.layers)} layers are recomputed to save memory")
    return notes
