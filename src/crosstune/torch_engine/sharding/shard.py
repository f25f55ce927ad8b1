"""Shard a single-device model across a mesh with FSDP2: each block, then the rest; also block by block while it loads."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
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

from crosstune.config.conditions import ADAPTER_METHODS
from crosstune.config.resolve.plan import Plan
from crosstune.core.errors import UserError
from crosstune.process.ranks import Ranks
from crosstune.torch_engine.device import release_freed_memory
from crosstune.torch_engine.loading.adapters import Adapted, adapt_part, choose_adapted, saved_parameters
from crosstune.torch_engine.quantized import StoredWeight
from crosstune.torch_engine.sharding.local_shard import find_blocks, is_sharded

REPLICAS, SHARDS = "replicas", "shards"
"""Names of the mesh dimensions."""
SHARDED_SCALES = 1024
"""Scales and zero points with at least this number of elements are sharded; smaller ones are replicated."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """The division of a model across the processes of a run."""

    sharded: bool
    """True if each process stores a shard of the parameters, gradients and moments; false if it stores all of them."""
    reshard_after_forward: bool = True
    """True if gathered parameters are freed between the forward and the backward pass."""
    hybrid: bool = False
    """True if the model is sharded within each host and replicated across hosts."""


STRATEGIES = {
    "full_shard": Strategy(sharded=True),
    "shard_grad_op": Strategy(sharded=True, reshard_after_forward=False),
    "hybrid_full_shard": Strategy(sharded=True, hybrid=True),
    "hybrid_shard_grad_op": Strategy(sharded=True, reshard_after_forward=False, hybrid=True),
    "ddp": Strategy(sharded=False),
    "no_shard": Strategy(sharded=False),
}
"""--sharding_strategy -> its strategy. `no_shard` is FSDP's name for ddp."""


def make_mesh(strategy: Strategy, ranks: Ranks, *, device_type: str) -> DeviceMesh:
    """Return the mesh of a strategy: one dimension of shards or replicas, or both if it is hybrid."""
    if not strategy.sharded:
        return init_device_mesh(device_type, (ranks.size,), mesh_dim_names=(REPLICAS,))
    if not strategy.hybrid:
        return init_device_mesh(device_type, (ranks.size,), mesh_dim_names=(SHARDS,))
    if ranks.size % ranks.local_size:
        raise UserError(
            f"A hybrid --sharding_strategy cannot divide {ranks.size} processes into hosts of {ranks.local_size}.",
            why="it shards within a host and replicates across hosts, so every host needs the same number of processes.",
            do="start the same number on every host, or use --sharding_strategy full_shard",
        )
    shape = (ranks.size // ranks.local_size, ranks.local_size)
    return init_device_mesh(device_type, shape, mesh_dim_names=(REPLICAS, SHARDS))


def shard(
    model: nn.Module, *, strategy: Strategy, blocks: Iterable[nn.Module] | None = None, **options: Any
) -> nn.Module:
    """Shard a model in place with the options of `shard_module` and return it; do nothing if the strategy does not shard.

    `blocks` are the modules to gather one at a time, by default the result of `find_blocks`.
    """
    if not strategy.sharded:
        return model
    for block in find_blocks(model).values() if blocks is None else blocks:
        shard_module(block, strategy=strategy, **options)
    return shard_root(model, strategy=strategy, **options)


def shard_root(model: nn.Module, **options: Any) -> nn.Module:
    """Shard the parameters outside of blocks: the input embedding, unless it is tied to the head, and the rest."""
    embedding = _own_embedding(model)
    if embedding is not None and not isinstance(embedding, FSDPModule):
        shard_module(embedding, **options)
    # The backward pass starts with the root, so its parameters stay gathered after the forward pass.
    shard_module(model, **options, reshard=False)
    if hasattr(model, "set_reduce_scatter_unused_params"):  # torch 2.12 and later
        # A weight that only some ranks use, such as an expert's, would make their messages differ in length.
        model.set_reduce_scatter_unused_params(True)
    return model


def _kept_wide(module: nn.Module) -> set[nn.Parameter]:
    """Return the fp32 parameters of a module whose other trained parameters have 16 bits, such as the bias of a router or a
    scalar head.

    FSDP2 needs one dtype per module and would cast them to 16 bits, so every rank stores them whole.
    """
    trained = {p for p in module.parameters() if not is_sharded(p) and p.requires_grad}
    wide = {p for p in trained if p.dtype == torch.float32}
    return wide if len({p.dtype for p in trained}) > 1 else set()


def _widen_trained(module: nn.Module, kept: Collection[nn.Parameter]) -> torch.dtype | None:
    """Store the parameters of a module in fp32 if all are trained in one 16-bit dtype; return that dtype, else None.

    FSDP2 gathers them in the 16-bit dtype. The shards are then their own masters, and gradients are summed in fp32.
    """
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
    """Shard the parameters of a module that are not sharded yet. Scalars are replicated.

    Without `precision`, trained 16-bit parameters are stored in fp32 and gathered in 16 bits, and gradients are reduced in
    fp32; adapters, scales and a frozen base keep their dtypes.
    """
    integers = shards_integers(mesh)
    _make_scales_parameters(module, integers=integers)
    if not integers:
        _store_as_floats(module, precision=precision)
    kept: set[nn.Parameter] = set()
    if precision is None:
        kept = _kept_wide(module)
        precision = MixedPrecisionPolicy(
            param_dtype=_widen_trained(module, kept),
            reduce_dtype=torch.float32,
            output_dtype=None,
            cast_forward_inputs=False,
        )
    for parameter in module.parameters():
        if not parameter.is_contiguous():  # FSDP2 rejects it
            parameter.data = parameter.data.contiguous()
    sharded: Any = fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=strategy.reshard_after_forward if reshard is None else reshard,
        mp_policy=precision,
        offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        if cpu_offload
        else OffloadPolicy(),
        ignored_params=kept | {parameter for parameter in module.parameters() if parameter.ndim == 0},
    )
    sharded.computes_in = precision.param_dtype
    # The loss is already divided by the weight of the whole step, so gradients are summed. gloo supports no other factor
    # unless it is forced to a plain sum.
    sharded.set_force_sum_reduction_for_comms(True)
    sharded.set_gradient_divide_factor(1.0)


@functools.lru_cache(maxsize=1)
def shards_integers(mesh: DeviceMesh) -> bool:
    """Return True if FSDP2 accepts a frozen integer parameter; torch 2.11 does not."""
    probe = nn.Module()
    zeros = torch.zeros(mesh.size(), dtype=torch.uint8, device=mesh.device_type)
    probe.packed = nn.Parameter(zeros, requires_grad=False)
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
            why="its FSDP2 does not support integers and would round packed bits stored as floats.",
            do="install torch 2.13 or later, or do not use mixed precision",
        )
    for weight in stored:
        if not is_sharded(weight.packed):
            weight.store_as_float()


def _make_scales_parameters(module: nn.Module, *, integers: bool) -> None:
    """Register large scales of quantized weights as frozen parameters, since FSDP2 shards only parameters.

    Scalars and tables stay replicated buffers, and so do integer scales if FSDP2 accepts no integers.
    """
    for stored in module.modules():
        if isinstance(stored, StoredWeight):
            for name, tensor in list(stored.named_buffers(recurse=False)):
                if tensor.numel() >= SHARDED_SCALES and (integers or tensor.is_floating_point()):
                    delattr(stored, name)
                    stored.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def _own_embedding(model: nn.Module) -> nn.Module | None:
    """Return the input embedding of a language model, or None if its weight is tied."""
    get_input = getattr(model, "get_input_embeddings", None)
    embedding = get_input() if get_input is not None else None
    if not isinstance(embedding, nn.Embedding):
        return None
    users = [m for m in model.modules() if getattr(m, "weight", None) is embedding.weight]
    return embedding if len(users) == 1 else None


def original_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtypes of trained parameters before they were widened, by name."""
    found: dict[str, torch.dtype | None] = {}
    for prefix, module in model.named_modules():  # outer modules first
        if isinstance(module, FSDPModule):
            computes_in: Any = getattr(module, "computes_in", None)
            own = module.named_parameters(prefix=prefix)
            found |= {name: computes_in for name, p in own if is_sharded(p) or p.ndim == 0}
    return {name: dtype for name, dtype in found.items() if dtype is not None}


@dataclass(kw_only=True)
class ShardOnLoad:
    """Adapt and shard a model block by block while it loads, so that no process stores the whole model.

    Call it with each loaded block, and last with "" for the rest.
    """

    plan: Plan
    mesh: DeviceMesh
    strategy: Strategy
    autocast: torch.dtype | None
    adapters: dict[str, Adapted] = field(default_factory=dict)
    is_done: bool = False
    _chosen: Sequence[str] | None = None
    _saved: Sequence[str] = ()

    def __call__(self, model: nn.Module, block: str) -> None:
        part = model.get_submodule(block)
        if self.plan.method in ADAPTER_METHODS:
            self._add_adapters(model, part, block)
        shard_loaded: Any = shard_module if block else shard_root
        offload = self.plan.config.use_cpu_offload
        shard_loaded(part, mesh=self.mesh, strategy=self.strategy, cpu_offload=offload)
        self.is_done = not block
        release_freed_memory()

    def finish_all(self, model: nn.Module) -> dict[str, Adapted]:
        """Adapt and shard a model that its task built at once; return the adapters by canonical name."""
        for block in [] if self.is_done else [*find_blocks(model), ""]:
            self(model, block)
        return self.adapters

    def _add_adapters(self, model: nn.Module, part: nn.Module, block: str) -> None:
        if self._chosen is None:
            self._chosen = choose_adapted(model, self.plan)
            self._saved = saved_parameters(model, self.plan, adapted=self._chosen)
        for parameter in part.parameters():
            if not is_sharded(parameter):
                parameter.requires_grad_(False)
        for name in self._saved:
            if not is_sharded(parameter := model.get_parameter(name)) and (
                not block or name.startswith(f"{block}.")
            ):
                parameter.requires_grad_()
        names = [
            name
            for name in self._chosen
            if name not in self.adapters and (not block or name.startswith(f"{block}."))
        ]
        found = self.adapters | adapt_part(model, part, names, plan=self.plan, autocast=self.autocast)
        self.adapters = {name: found[name] for name in self._chosen if name in found}
