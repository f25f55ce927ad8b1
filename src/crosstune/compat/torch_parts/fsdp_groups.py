"""Connect the processes of the guides' MPSFSDPWrapper, and make the mesh of its sharding strategy."""

from __future__ import annotations

import atexit
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from crosstune.compat.torch_parts.fsdp_config import MPSFSDPConfig
from crosstune.core.errors import UserError
from crosstune.torch_engine.sharding.shard import REPLICAS, SHARDS
from crosstune.torch_engine.sharding.staged_backend import NAME, register_staged_backend


def connect(config: MPSFSDPConfig) -> None:
    """Join the other processes unless the program has done so; a single process gets a group of one.

    Then set world_size and rank from the group.
    """
    if not dist.is_initialized():
        if config.world_size > 1:
            dist.init_process_group(
                "gloo", init_method=config.init_method, world_size=config.world_size, rank=config.rank
            )
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:  # started by torchrun, and left at the default of 1
            dist.init_process_group("gloo", init_method="env://")
        else:
            connect_alone()
    size, rank = dist.get_world_size(), dist.get_rank()
    if config.world_size not in (1, size):
        raise UserError(
            f"world_size={config.world_size} does not match the {size} processes that are connected.",
            do="pass the world_size and rank of torch.distributed, or leave them out",
        )
    config.world_size, config.rank = size, rank


def connect_alone() -> None:
    """Make a group of this process alone, without a port; FSDP2 needs one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(disconnect)


def disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def make_mesh(strategy: ShardingStrategy, device: str) -> DeviceMesh:
    """Return the mesh over all processes. With NO_SHARD each process is a replica with one shard, the whole model."""
    if strategy is not ShardingStrategy.NO_SHARD:
        return DeviceMesh.from_group(open_group(device), device, mesh_dim_names=(SHARDS,))
    ranks = list(range(dist.get_world_size()))
    alone = [open_group(device, [rank]) for rank in ranks][dist.get_rank()]
    return DeviceMesh.from_group(
        [open_group(device), alone],
        device,
        mesh=torch.tensor(ranks).view(-1, 1),
        mesh_dim_names=(REPLICAS, SHARDS),
    )


def open_group(device: str, ranks: list[int] | None = None) -> Any:
    """Return a group for tensors of this device. Collective: every process makes every group."""
    if device == "cpu":
        if ranks is None and dist.get_backend() == "gloo":
            return dist.group.WORLD
        return dist.new_group(ranks, backend="gloo")
    register_staged_backend()
    return dist.new_group(ranks, backend=NAME)
