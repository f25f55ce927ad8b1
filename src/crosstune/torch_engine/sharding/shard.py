"""Shard a single-device model over a mesh with FSDP2: each block, then the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from crosstune.torch_engine.quantized import StoredWeight
from crosstune.torch_engine.sharding.find_blocks import find_blocks
from crosstune.torch_engine.sharding.parts import is_sharded
from crosstune.torch_engine.sharding.strategies import Strategy

SHARDED_SCALES = 1024
"""Scales and zero points of a quantized weight are sharded from this number of elements on."""


def shard(
    model: nn.Module,
    *,
    mesh: DeviceMesh,
    strategy: Strategy,
    cpu_offload: bool = False,
    blocks: Iterable[nn.Module] | None = None,
) -> nn.Module:
    """Shard a model in place and return it; with a strategy that does not shard, leave it as it is.

    `blocks` are the modules to gather one at a time, by default those of `find_blocks`. Trained 16-bit parameters are kept
    in fp32 and computed with in 16 bits.
    """
    if not strategy.sharded:
        return model
    for block in find_blocks(model).values() if blocks is None else blocks:
        shard_module(block, mesh=mesh, strategy=strategy, cpu_offload=cpu_offload)
    return shard_root(model, mesh=mesh, strategy=strategy, cpu_offload=cpu_offload)


def shard_root(
    model: nn.Module,
    *,
    mesh: DeviceMesh,
    strategy: Strategy,
    cpu_offload: bool = False,
) -> nn.Module:
    """Shard what is not in a block: the input embedding by itself, unless the head has the same weight, and the rest."""
    embedding = _own_embedding(model)
    if embedding is not None and not isinstance(embedding, FSDPModule):
        shard_module(embedding, mesh=mesh, strategy=strategy, cpu_offload=cpu_offload)
    # The parameters of the root are used first in the backward pass, so they are kept after the forward pass.
    shard_module(model, mesh=mesh, strategy=strategy, cpu_offload=cpu_offload, reshard=False)
    if hasattr(model, "set_reduce_scatter_unused_params"):  # torch 2.12 and later
        # A weight that only some ranks use, such as an expert's, would make their messages differ in length.
        model.set_reduce_scatter_unused_params(True)
    return model


def _widen_trained(module: nn.Module) -> torch.dtype | None:
    """Keep the trained parameters of a module in fp32 if all of its parameters are trained in one 16-bit dtype, which is
    returned: FSDP2 casts to it when it gathers them. So the parts are their own masters, and gradients of several ranks
    are summed without rounding."""
    own = [p for p in module.parameters() if not is_sharded(p) and p.is_floating_point()]
    dtypes = {p.dtype for p in own}
    if len(dtypes) != 1 or dtypes == {torch.float32} or not all(p.requires_grad for p in own):
        return None
    for parameter in own:
        parameter.data = parameter.data.float()
    return dtypes.pop()


def shard_module(
    module: nn.Module,
    *,
    mesh: DeviceMesh,
    strategy: Strategy,
    cpu_offload: bool = False,
    reshard: bool | None = None,
) -> None:
    """Shard one module, with the parameters in it that are not sharded yet. Scalars stay whole on every rank."""
    _make_scales_parameters(module)
    compute = _widen_trained(module)
    for parameter in module.parameters():
        if not parameter.is_contiguous():  # which FSDP2 refuses
            parameter.data = parameter.data.contiguous()
    sharded: Any = fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=strategy.reshard_after_forward if reshard is None else reshard,
        mp_policy=_precision(compute),
        offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        if cpu_offload
        else OffloadPolicy(),
        ignored_params={parameter for parameter in module.parameters() if parameter.ndim == 0},
    )
    sharded.computes_in = compute
    # The loss is divided by the weight of the whole window, so gradients are summed. gloo cannot sum with another factor
    # than its own unless it is told to sum plainly.
    sharded.set_force_sum_reduction_for_comms(True)
    sharded.set_gradient_divide_factor(1.0)


def _precision(compute: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return how parameters are cast when gathered: not at all unless they were widened. Adapters, scales and a frozen
    base have dtypes of their own, which must arrive as they are. Gradients are always reduced in fp32."""
    return MixedPrecisionPolicy(
        param_dtype=compute,
        reduce_dtype=torch.float32,
        output_dtype=None,
        cast_forward_inputs=False,
    )


def _make_scales_parameters(module: nn.Module) -> None:
    """Register the scales of quantized weights as frozen parameters, since FSDP2 shards only parameters.

    Scalars and tables, which every element needs, stay buffers and are replicated.
    """
    for stored in module.modules():
        if isinstance(stored, StoredWeight):
            for name, tensor in list(stored.named_buffers(recurse=False)):
                if tensor.numel() >= SHARDED_SCALES:
                    delattr(stored, name)
                    stored.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def _own_embedding(model: nn.Module) -> nn.Module | None:
    """Return the input embedding of a language model if no other module has its weight."""
    get_input = getattr(model, "get_input_embeddings", None)
    embedding = get_input() if get_input is not None else None
    if not isinstance(embedding, nn.Embedding):
        return None
    users = [m for m in model.modules() if getattr(m, "weight", None) is embedding.weight]
    return embedding if len(users) == 1 else None


def original_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtype that trained parameters had before they were widened, by name."""
    found: dict[str, torch.dtype | None] = {}
    for prefix, module in model.named_modules():  # a module comes before those in it
        if isinstance(module, FSDPModule):
            computes_in: Any = getattr(module, "computes_in", None)
            found |= {name: computes_in for name, _ in module.named_parameters(prefix=prefix)}
    return {name: dtype for name, dtype in found.items() if dtype is not None}
