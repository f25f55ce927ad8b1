"""Choose between the fast layers and transformers' own for a model that is about to be trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from crosstune.config.plan import Plan
from crosstune.core.fast_layers import kept_by
from crosstune.torch_engine.adapters import Adapted
from crosstune.torch_engine.kernels.calibrate import LeftOut, leave_out_of_fp8
from crosstune.torch_engine.kernels.decoder import FastDecoder
from crosstune.torch_engine.kernels.find_parts import why_general, why_other_adapters
from crosstune.torch_engine.kernels.fp8_weights import why_no_fp8
from crosstune.torch_engine.kernels.operations import has_triton
from crosstune.torch_engine.kernels.pass_graphs import PassGraphs
from crosstune.torch_engine.kernels.recomputation import choose_recomputation, describe_layer
from crosstune.torch_engine.precision import Precision


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
) -> tuple[FastDecoder | None, list[str]]:
    """Return the fast decoder over a model's modules, or None where the general layers are used, and what the user should
    know of it. A reason that was a warning already is not repeated."""
    if plan.config.kernels != "fast":
        return None, []
    chosen = plan.has_chosen("kernels")
    reason = why_general(model)
    if reason is not None:
        return None, describe_general(reason) if chosen else []
    reason = why_other_adapters(adapters) or (why_slow(device) if chosen else None)
    if reason is not None:
        return None, describe_general(reason)
    dtype = precision.autocast or precision.weights
    asked = plan.config.base_precision == "fp8" or plan.quantizer == "fp8"
    refused = why_no_fp8(device, dtype) if asked else None
    decoder = FastDecoder(model, dtype=dtype, fp8=asked and refused is None)
    left_out = leave_out_of_fp8(
        decoder, folder=folder, tolerance=plan.config.fp8_tolerance, seed=plan.config.seed
    )
    decoder.set_recomputation(choose_recomputation(decoder, plan))
    return decoder, describe_decoder(decoder, refused=refused, left_out=left_out)


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
            f"base_precision: {len(left_out.names)} of {still + len(left_out.names)} groups of layers leave fp8, such as "
            f"{left_out.names[0]}; with them the model's predictions were {left_out.before:.2g} nats per token away from "
            f"those of its own weights, without them {left_out.after:.2g} (--fp8_tolerance)"
        )
    if num_full := decoder.recompute.count("full"):
        notes.append(f"kernels: {num_full} of {len(decoder.layers)} layers are recomputed to save memory")
    return notes


def open_graphs(
    decoder: FastDecoder | None, parameters: Sequence[nn.Parameter], *, plan: Plan
) -> PassGraphs | None:
    """Return the graphs of captured passes, if the plan asks for them and the layers can be captured."""
    if not plan.config.cuda_graphs or decoder is None or plan.backend.name != "cuda":
        return None
    if "full" in decoder.recompute or plan.config.use_activation_cpu_offload:
        return None
    layer = describe_layer(decoder, length=plan.config.context_length)
    return PassGraphs(parameters, bytes_per_token=kept_by(layer.kept(), decoder.recompute))
