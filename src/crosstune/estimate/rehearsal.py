"""The counts of a rehearsed step on one rank, and the time of its collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from crosstune.estimate.model_shape import ModelShape, Step
from crosstune.estimate.step_time import Cluster, DeviceSpeed, StepTime, collective_s, step_time

REDUCED_AFTER = "all-reduce"
"""Counted as exposed; the other collectives overlap with the passes."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Equal collectives of a step."""

    kind: str
    num_bytes: int
    """The gathered or reduced tensor of each."""
    times: int
    num_ranks: int
    across_nodes: bool

    @property
    def total_bytes(self) -> int:
        return self.num_bytes * self.times


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The bytes of one rank in the first step, and its collectives."""

    num_ranks: int
    parameters: int
    """Of the whole model."""
    weights: int
    """Parameters, their fp32 masters and buffers, as sharded."""
    gradients: int
    optimizer: int
    activations: int
    """Kept at the end of the forward pass, with the parameters that stay gathered."""
    peak: int
    """The largest moment of a step with optimizer state."""
    collectives: Sequence[Collective]

    def totals(self) -> dict[str, tuple[int, int]]:
        """Return kind -> number of collectives and their bytes."""
        found: dict[str, tuple[int, int]] = {}
        for each in self.collectives:
            times, num_bytes = found.get(each.kind, (0, 0))
            found[each.kind] = (times + each.times, num_bytes + each.total_bytes)
        return found

    def step_time(
        self, shape: ModelShape, step: Step, speed: DeviceSpeed, *, cluster: Cluster, row: float | None
    ) -> StepTime:
        """Return the time of a step: the predicted computation with the counted collectives."""
        alone = step_time(
            shape, step, speed, cluster=replace(cluster, num_nodes=1, num_local=1), tokens_per_row=row
        )
        after = during = 0.0
        for each in self.collectives:
            moved = each.num_bytes * (2 if each.kind == REDUCED_AFTER else 1)
            seconds = each.times * collective_s(
                moved, each.num_ranks, speed, num_local=cluster.num_local, across=each.across_nodes
            )
            after, during = (
                (after + seconds, during) if each.kind == REDUCED_AFTER else (after, during + seconds)
            )
        hidden = min(during, alone.compute_s)
        return replace(
            alone,
            communication_s=after + during - hidden,
            hidden_s=hidden,
            tokens=alone.tokens * cluster.size,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Rehearsal:
        found = [Collective(**each) for each in data["collectives"]]
        return cls(**{**data, "collectives": found})
