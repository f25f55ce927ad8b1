"""Shard a single-device model over a mesh with FSDP2: each block, then the rest."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from crosstune.core.errors import UserError
from crosstune.process.ranks import Ranks
from crosstune.torch_engine.quantized import StoredWeight
from crosstune.torch_engine.sharding.local_shard import find_blocks, is_sharded

REPLICAS, SHARDS = "replicas", "shards"
"""Names of the mesh dimensions."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """The division of a model over the processes of a run."""

    sharded: bool
    """True if each process holds a part of the parameters, gradients and moments; otherwise it holds all of them."""
    reshard_after_forward: bool = True
    """True if gathered parameters are freed between the forward and the backward pass."""
    hybrid: bool = False
    """True if the parts are divided within a host only, and each host holds the whole model."""


STRATEGIES = {
    "full_shard": Strategy(sharded=True),
    "shard_grad_op": Strategy(sharded=True, reshard_after_forward=False),
    "hybrid_full_shard": Strategy(sharded=True, hybrid=True),
    "hybrid_shard_grad_op": Strategy(sharded=True, reshard_after_forward=False, hybrid=True),
    "ddp": Strategy(sharded=False),
    "no_shard": Strategy(sharded=False),
}
"""By the values of --sharding_strategy. `no_shard` is FSDP's name for what ddp does."""


def make_mesh(strategy: Strategy, ranks: Ranks, *, device_type: str) -> DeviceMesh:
    """Return the mesh of a strategy: one dimension of shards or replicas, or both if it is hybrid."""
    if not strategy.sharded:
        return init_device_mesh(device_type, (ranks.size,), mesh_dim_names=(REPLICAS,))
    if not strategy.hybrid:
        return init_device_mesh(device_type, (ranks.size,), mesh_dim_names=(SHARDS,))
    if ranks.size % ranks.local_size:
        raise UserError(
            f"A hybrid --sharding_strategy cannot divide {ranks.size} processes into hosts of {ranks.local_size}.",
            why="it shards within a host and replicates over hosts, so all need the same number of processes.",
            do="start the same number on every host, or use --sharding_strategy full_shard",
        )
    shape = (ranks.size // ranks.local_size, ranks.local_size)
    return init_device_mesh(device_type, shape, mesh_dim_names=(REPLICAS, SHARDS))


SHARDED_SCALES = 1024
"""Scales and zero points of a quantized weight are sharded from this number of elements on."""


def shard(
    model: nn.Module,
    *,
    mesh: DeviceMesh,
    strategy: Strategy,
    cpu_offload: bool = False,
    blocks: Iterable[nn.Module] | None = None,
    precision: MixedPrecisionPolicy | None = None,
) -> nn.Module:
    """Shard a model in place and return it; with a strategy that does not shard, leave it as it is.

    `blocks` are the modules to gather one at a time, by default those of `find_blocks`. Trained 16-bit parameters are kept
    in fp32 and computed with in 16 bits, unless `precision` says otherwise.
    """
    if not strategy.sharded:
        return model
    for block in find_blocks(model).values() if blocks is None else blocks:
        shard_module(block, mesh=mesh, strategy=strategy, cpu_offload=cpu_offload, precision=precision)
    return shard_root(model, mesh=mesh, strategy=strategy, cpu_offload=cpu_offload, precision=precision)


def shard_root(
    model: nn.Module,
    *,
    mesh: DeviceMesh,
    strategy: Strategy,
    cpu_offload: bool = False,
    precision: MixedPrecisionPolicy | None = None,
) -> nn.Module:
    """Shard what is not in a block: the input embedding by itself, unless the head has the same weight, and the rest."""
    embedding = _own_embedding(model)
    if embedding is not None and not isinstance(embedding, FSDPModule):
        shard_module(embedding, mesh=mesh, strategy=strategy, cpu_offload=cpu_offload, precision=precision)
    # The parameters of the root are used first in the backward pass, so they are kept after the forward pass.
    shard_module(
        model, mesh=mesh, strategy=strategy, cpu_offload=cpu_offload, precision=precision, reshard=False
    )
    if hasattr(model, "set_reduce_scatter_unused_params"):  # torch 2.12 and later
        # A weight that only some ranks use, such as an expert's, would make their messages differ in length.
        model.set_reduce_scatter_unused_params(True)
    return model


def _kept_wide(module: nn.Module) -> set[nn.Parameter]:
    """Return the fp32 parameters among trained 16-bit ones. FSDP2 wants one dtype in a module, and would compute with them
    in 16 bits, so every rank holds them whole; they are few and small, such as the bias of a router or a scalar head."""
    trained = {p for p in module.parameters() if not is_sharded(p) and p.requires_grad}
    wide = {p for p in trained if p.dtype == torch.float32}
    return wide if len({p.dtype for p in trained}) > 1 else set()


def _widen_trained(module: nn.Module, kept: Collection[nn.Parameter]) -> torch.dtype | None:
    """Keep the trained parameters of a module in fp32 if all of its parameters are trained in one 16-bit dtype, which is
    returned: FSDP2 casts to it when it gathers them. So the parts are their own masters, and gradients of several ranks
    are summed without rounding."""
    own = [p for p in module.parameters() if not is_sharded(p) and p.is_floating_point() and p not in kept]
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
    precision: MixedPrecisionPolicy | None = None,
    reshard: bool | None = None,
) -> None:
    """Shard one module, with the parameters in it that are not sharded yet. Scalars stay whole on every rank."""
    integers = shards_integers(mesh)
    _make_scales_parameters(module, integers=integers)
    if not integers:
        _store_as_floats(module, precision=precision)
    kept = _kept_wide(module) if precision is None else set()
    compute = _widen_trained(module, kept) if precision is None else precision.param_dtype
    for parameter in module.parameters():
        if not parameter.is_contiguous():  # which FSDP2 refuses
            parameter.data = parameter.data.contiguous()
    sharded: Any = fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=strategy.reshard_after_forward if reshard is None else reshard,
        mp_policy=_precision(compute) if precision is None else precision,
        offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        if cpu_offload
        else OffloadPolicy(),
        ignored_params=kept | {parameter for parameter in module.parameters() if parameter.ndim == 0},
    )
    sharded.computes_in = compute
    # The loss is divided by the weight of the whole window, so gradients are summed. gloo cannot sum with another factor
    # than its own unless it is told to sum plainly.
    sharded.set_force_sum_reduction_for_comms(True)
    sharded.set_gradient_divide_factor(1.0)


@functools.lru_cache(maxsize=1)
def shards_integers(mesh: DeviceMesh) -> bool:
    """Try whether FSDP2 takes a frozen parameter of integers; that of torch 2.11 does not."""
    probe = nn.Module()
    device = "cpu" if mesh.device_type == "cpu" else mesh.device_type
    probe.packed = nn.Parameter(
        torch.zeros(mesh.size(), dtype=torch.uint8, device=device), requires_grad=False
    )
    try:
        fully_shard(probe, mesh=mesh)
    except RuntimeError:
        return False
    return True


def _store_as_floats(module: nn.Module, *, precision: MixedPrecisionPolicy | None) -> None:
    stored = [found for found in module.modules() if isinstance(found, StoredWeight)]
    if stored and precision is not None and precision.param_dtype is not None:
        raise UserError(
            f"torch {torch.__version__} cannot shard a quantized model in mixed precision.",
            why="its FSDP2 takes no integers, and would round packed bits that are stored as floats.",
            do="install torch 2.13 or later, or leave mixed precision out",
        )
    for weight in stored:
        if not is_sharded(weight.packed):
            weight.store_as_float()


def _precision(compute: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return how parameters are cast when gathered: not at all unless they were widened. Adapters, scales and a frozen
    base have dtypes of their own, which must arrive as they are. Gradients are always reduced in fp32."""
    return MixedPrecisionPolicy(
        param_dtype=compute,
        reduce_dtype=torch.float32,
        output_dtype=None,
        cast_forward_inputs=False,
    )


def _make_scales_parameters(module: nn.Module, *, integers: bool) -> None:
    """Register the scales of quantized weights as frozen parameters, since FSDP2 shards only parameters.

    Scalars and tables, which every element needs, stay buffers and are replicated; so do scales of integers where FSDP2
    does not take them.
    """
    for stored in module.modules():
        if isinstance(stored, StoredWeight):
            for name, tensor in list(stored.named_buffers(recurse=False)):
                if tensor.numel() >= SHARDED_SCALES and (integers or tensor.is_floating_point()):
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
            own = module.named_parameters(prefix=prefix)
            found |= {name: computes_in for name, p in own if is_sharded(p) or p.ndim == 0}
    return {name: dtype for name, dtype in found.items() if dtype is not None}
