"""Choose between the fast layers and transformers' own for a model that is about to be trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from crosstune.config.resolve.plan import Plan
from crosstune.core.errors import UserError
from crosstune.core.quantization import BaseChoice
from crosstune.estimate.fast_layers import FastLayer, Recompute, attention_bytes, plan_recomputation
from crosstune.estimate.memory import fast_working_bytes
from crosstune.process.ranks import Group
from crosstune.torch_engine.device import Precision
from crosstune.torch_engine.kernels.calibrate import LeftOut, leave_out_of_fp8, put_back_layers
from crosstune.torch_engine.kernels.decoder import FastDecoder
from crosstune.torch_engine.kernels.find_parts import why_general, why_other_adapters
from crosstune.torch_engine.kernels.fp8_weights import why_no_fp8
from crosstune.torch_engine.kernels.operations import has_triton
from crosstune.torch_engine.loading.adapters import Adapted


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


def warn_of_general(model: Any, *, plan: Plan) -> list[str]:
    """Return a warning if a model cannot use the fast layers that the user asked for."""
    if plan.config.kernels != "fast" or plan.has_chosen("kernels"):
        return []
    return describe_general(why_general(model))


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
    """Return the fast decoder over a model's modules (None for the general layers), the choice about the base, and notes for
    the user. A reason that was already a warning is not repeated.

    A recorded choice is kept; otherwise the first process of a group chooses and the others follow.
    """
    if plan.config.kernels != "fast":
        return None, decide_base(plan), []
    reason, notes = find_reason(model, adapters, plan=plan, device=device)
    dtype = precision.autocast or precision.weights
    asked = plan.config.base_precision == "fp8" or plan.quantizer == "fp8"
    refused = why_no_fp8(device, dtype) if asked and reason is None else None
    base, left_out = decide_base(plan), LeftOut()
    open_yet = asked and (base is None or base.outside_fp8 is None)
    is_first = group is None or group.ranks.first
    if open_yet and not is_first:
        base = share_base(base, group)
        put_back_layers(
            model, base.kept if base is not None else (), dtype=dtype, device=device, folder=folder
        )
    decoder = None
    if reason is None:
        in_fp8 = asked and refused is None
        outside = base.outside_fp8 if base is not None and in_fp8 else None
        decoder = FastDecoder(model, dtype=dtype, fp8=in_fp8, outside_fp8=outside or ())
        check_groups(decoder)
    if open_yet and is_first:
        if decoder is not None and refused is None:
            left_out = leave_out_of_fp8(
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
    return decoder, base, describe_decoder(decoder, refused=refused, left_out=left_out)


def decide_base(plan: Plan) -> BaseChoice | None:
    """Return what is decided about the base without measuring anything: what its record says or, if its weights are in fp8,
    that all of them stay so."""
    if plan.base is None and plan.quantizer == "fp8":
        return BaseChoice(quantizer="fp8")
    return plan.base


def share_base(base: BaseChoice | None, group: Group | None) -> BaseChoice | None:
    """Return what the first process of a group has decided."""
    if group is None:
        return base
    fields = json.loads(group.share(json.dumps(asdict(base) if base is not None else None)))
    if fields is None:
        return None
    groups = fields["outside_fp8"]
    return BaseChoice(
        quantizer=fields["quantizer"],
        kept=tuple(fields["kept"]),
        outside_fp8=tuple(groups) if groups is not None else None,
    )


def find_reason(
    model: Any, adapters: Mapping[str, Adapted], *, plan: Plan, device: torch.device
) -> tuple[str | None, list[str]]:
    """Return why the general layers are used although the fast ones are asked for, and the sentence to say about it."""
    chosen = plan.has_chosen("kernels")
    reason = why_general(model)
    if reason is not None:
        return reason, describe_general(reason) if chosen else []
    reason = why_other_adapters(adapters) or (why_slow(device) if chosen else None)
    return reason, describe_general(reason)


def check_groups(decoder: FastDecoder) -> None:
    """Raise for a record that names groups of layers which the decoder does not have."""
    if unknown := sorted(set(decoder.outside_fp8) - decoder.groups().keys()):
        raise UserError(
            f"The checkpoint says that {unknown[0][:200]} is not in fp8, and this model has no such group of layers.",
            do="use the version of crosstune that wrote it, or --kernels general",
        )


def why_slow(device: torch.device) -> str | None:
    """Return why the fast layers are not worth choosing on a device that has them."""
    return (
        None if device.type == "cpu" or has_triton() else "their kernels need Triton, which is not installed"
    )


def describe_general(reason: str | None) -> list[str]:
    """Return a sentence if there is a reason for the general layers."""
    return [f"kernels: the general layers are used, since {reason}"] if reason else []


def describe_decoder(decoder: FastDecoder, *, refused: str | None, left_out: LeftOut) -> list[str]:
    """Return sentences about what memory and a first pass decided."""
    notes = []
    if refused is not None:
        notes.append(f"base_precision: products are computed in {decoder.dtype}, since {refused}")
    if left_out.names:
        still = sum(stacked.in_fp8 for stacked in decoder.groups().values())
        notes.append(
            f"base_precision: {len(left_out.names)} of {still + len(left_out.names)} groups of layers are kept out of fp8, such as "
            f"{left_out.names[0]}; with them the model's predictions were {left_out.before:.2g} nats per token away from "
            f"those of its own weights, without them {left_out.after:.2g} (--fp8_tolerance)"
        )
    elif decoder.outside_fp8:
        notes.append(
            f"base_precision: {len(decoder.outside_fp8)} groups of layers stay out of fp8, as chosen when the run began; "
            "--fp8_tolerance is ignored after the first start"
        )
    if num_full := decoder.recompute.count("full"):
        notes.append(f"kernels: {num_full} of {len(decoder.layers)} layers are recomputed to save memory")
    return notes
