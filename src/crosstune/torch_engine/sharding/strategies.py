"""Define the sharding strategies and the device mesh of each."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from crosstune.core.errors import UserError
from crosstune.core.ranks import Ranks

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
