"""Divide the micro-batches of a step across the ranks, and combine their gradients and numbers."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from crosstune.config.resolve.plan import Plan
from crosstune.core.out_of_memory import STEP, OutOfMemory
from crosstune.core.protocols import PreparedBatch, StatePart
from crosstune.process.ranks import Group, buckets
from crosstune.torch_engine.group import peer_errors
from crosstune.torch_engine.session.state import export_random, import_random
from crosstune.torch_engine.sharding.context import RowPart
from crosstune.torch_engine.sharding.local_shard import free_gathered, set_gradient_sync
from crosstune.torch_engine.sharding.shard import REPLICAS, STRATEGIES, Strategy, make_mesh


@dataclass(kw_only=True)
class Parallel:
    """The ranks of a run, with their mesh and strategy."""

    group: Group
    strategy: Strategy
    mesh: DeviceMesh
    device: torch.device
    reduce_once: bool = False
    """True if gradients are reduced only after the last micro-batch (--no_sync)."""
    part: RowPart | None = None
    """The part of every row on this rank; None for whole rows (--context_parallel)."""
    interrupted: BaseException | None = None
    """The error that interrupted a collective of a sharded model; further collectives would hang."""

    @property
    def size(self) -> int:
        return self.group.ranks.size

    @property
    def rank(self) -> int:
        return self.group.ranks.rank

    @property
    def num_teams(self) -> int:
        """The number of micro-batches computed at once: the ranks of a team share one."""
        return self.size // (self.part.count if self.part is not None else 1)

    @property
    def team(self) -> int:
        return self.rank // (self.part.count if self.part is not None else 1)

    @property
    def counts_rows(self) -> bool:
        """True for one rank of each team."""
        return self.part is None or self.part.number == 0

    @property
    def joins_passes(self) -> bool:
        """True if a pass has collectives: a rank that fails leaves the others waiting."""
        return self.strategy.sharded or self.part is not None

    @property
    def num_replicas(self) -> int:
        """The number of ranks or hosts with the same shard of the model."""
        names = self.mesh.mesh_dim_names or ()
        return self.mesh.size(names.index(REPLICAS)) if REPLICAS in names else 1

    @property
    def num_shards(self) -> int:
        return self.size // self.num_replicas if self.strategy.sharded else 1

    def state_part(self, shapes: Mapping[str, tuple[int, ...]]) -> StatePart:
        """Return the part of a sharded state on this rank. With a hybrid strategy, only the first host writes."""
        count = self.num_shards
        return StatePart(number=self.rank % count, count=count, writes=self.rank < count, shapes=dict(shapes))

    def local_micro_batches(
        self, model: nn.Module, window: Sequence[PreparedBatch]
    ) -> Iterator[tuple[PreparedBatch, bool]]:
        """Yield the micro-batches of this rank, each with a flag that is false for a filler.

        Micro-batch i belongs to team i % num_teams. All ranks of a sharded model must join each pass, so a rank without a
        micro-batch runs a filler whose loss is multiplied by zero.
        """
        num_turns = -(-len(window) // self.num_teams)
        seeds = self._seeds(len(window)) if self.size > 1 else []
        after = export_random(self.device) if seeds else {}
        for turn in range(num_turns):
            index = turn * self.num_teams + self.team
            counts = index < len(window)
            if not counts and not self.strategy.sharded:
                continue
            set_gradient_sync(model, not self.reduce_once or turn == num_turns - 1)
            if seeds:
                torch.manual_seed(seeds[index % len(window)])
            yield window[index] if counts else min(window, key=lambda batch: batch.num_tokens), counts
        if seeds:
            import_random(self.device, after)

    def _seeds(self, count: int) -> list[int]:
        """Return a seed for each micro-batch, drawn from the random state that all ranks share, so that the numbers do not
        depend on the rank."""
        drawn = int(torch.randint(2**62, ()))
        digests = [hashlib.sha256(f"{drawn}/{index}".encode()).digest() for index in range(count)]
        return [int.from_bytes(digest[:8], "little") >> 1 for digest in digests]

    @contextlib.contextmanager
    def passes(self, model: nn.Module, *, doing: str = STEP) -> Iterator[None]:
        """Run forward and backward passes; if one replica runs out of memory, raise OutOfMemory on all of them.

        A rank of a sharded model cannot tell the others, since they wait in a collective: it raises alone and exits.
        """
        failure: OutOfMemory | None = None
        try:
            yield
        except OutOfMemory as error:
            if self.joins_passes:
                why = "the other processes wait in this pass, so it cannot be repeated with fewer rows"
                raise OutOfMemory(f"{error.reason}; {why}", doing=error.doing) from error
            failure = error
        free_gathered(model)
        if not self.joins_passes and self.group.any(failure is not None):
            failure = failure or OutOfMemory("another process of the run has too little", doing=doing)
            failure.shared = True
            raise failure

    @contextlib.contextmanager
    def connected(self, doing: str) -> Iterator[None]:
        """Convert errors of collectives in the `with` block to PeerLost. After any error in it, a rank of a sharded
        model raises it again instead of starting further collectives."""
        if self.interrupted is not None:
            raise self.interrupted
        try:
            with peer_errors(self.group.ranks, doing=doing):
                yield
        except BaseException as error:
            self.interrupted = error if self.joins_passes else None
            raise

    def reduce_gradients(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Sum the gradients of replicated tensors. A tensor without a gradient on every rank stays without one."""
        present = self.group.sum_numbers(*(float(tensor.grad is not None) for tensor in tensors.values()))
        used = [tensor for tensor, count in zip(tensors.values(), present, strict=True) if count]
        for bucket in buckets(used, lambda tensor: tensor.nbytes):
            parts = [torch.zeros_like(t) if t.grad is None else t.grad for t in bucket]
            flat = torch.cat([part.reshape(-1) for part in parts])
            dist.all_reduce(flat)
            for tensor, values in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.grad = values.reshape(tensor.shape)

    def clip_gradients(
        self, sharded: Sequence[torch.Tensor], whole: Sequence[torch.Tensor], limit: float
    ) -> float:
        """Clip to a norm across all ranks and return the norm before. `whole` tensors are the same on every rank."""
        both = [*sharded, *whole]
        norm = _norm(both)
        if self.size > 1 and self.strategy.sharded:
            [squares] = self.group.sum_numbers(float(_norm(sharded)) ** 2)
            total = math.sqrt(squares / self.num_replicas + float(_norm(whole)) ** 2)
            norm = torch.tensor(total, device=norm.device)
        clip_grads_with_norm_(both, limit, norm)
        return float(norm)


def _norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return get_total_norm([tensor.grad for tensor in tensors if tensor.grad is not None])


def open_parallel(plan: Plan, group: Any, *, device: torch.device) -> Parallel:
    """Connect the devices of the ranks, and make the mesh of the plan's strategy."""
    strategy = STRATEGIES[plan.config.sharding_strategy]
    if device.type not in ("cpu", "mps"):
        device = torch.device(device.type, group.ranks.local_rank)
        torch.get_device_module(device).set_device(device)
    if not dist.is_initialized():
        group.open_devices(device, collective=plan.collective)
    part = None
    if plan.divides_rows:
        count = plan.config.context_parallel
        teams = init_device_mesh(
            device.type, (group.ranks.size // count, count), mesh_dim_names=("teams", "parts")
        )
        part = RowPart(number=group.ranks.rank % count, count=count, group=teams.get_group("parts"))
    return Parallel(
        group=group,
        part=part,
        strategy=strategy,
        mesh=make_mesh(strategy, group.ranks, device_type=device.type),
        device=device,
        reduce_once=plan.config.no_sync,
    )
