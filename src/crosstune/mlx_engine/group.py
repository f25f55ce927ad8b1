"""Connect the processes of a run through MLX's ring backend."""

from __future__ import annotations

import time
from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from crosstune.core.errors import PeerLost, PortTaken, UserError
from crosstune.process.ranks import Group, Limits, Ranks, buckets


class RingGroup(Group):
    """The processes of a run, connected by MLX's ring backend."""

    def __init__(self, ranks: Ranks, group: mx.distributed.Group) -> None:
        super().__init__()
        self.ranks, self._group = ranks, group

    def sum_arrays(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Sum each array across the processes. Names and their order must be the same on every rank."""
        summed: dict[str, mx.array] = {}
        for names in buckets(arrays, lambda name: arrays[name].nbytes):
            flat = self._sum(mx.concatenate([arrays[name].flatten() for name in names]))
            start = 0
            for name in names:
                size = arrays[name].size
                summed[name] = flat[start : start + size].reshape(arrays[name].shape)
                start += size
        mx.eval(summed)
        return summed

    def gather(self, data: bytes) -> list[bytes]:
        table = np.zeros((self.ranks.size, len(data)), np.uint8)
        table[self.ranks.rank] = np.frombuffer(data, np.uint8)
        return [row.tobytes() for row in np.array(self._sum(mx.array(table)))]

    def _sum(self, array: mx.array) -> mx.array:
        # Evaluate before and after: a ring that waits for a GPU kernel may deadlock.
        mx.eval(array)
        try:
            summed = mx.distributed.all_sum(array, group=self._group, stream=mx.cpu)
            mx.eval(summed)
        except RuntimeError as error:
            raise PeerLost(
                "The connection to another process of the run was lost.",
                why=str(error),
                do="read the last output of that process; --resume continues the run from its newest checkpoint",
            ) from error
        return summed


def connect(ranks: Ranks, limits: Limits) -> RingGroup:
    """Connect to the other processes. Call it first: they wait only a few seconds."""
    started = time.monotonic()
    while True:
        try:
            group = mx.distributed.init(strict=True, backend="ring")
        except RuntimeError as error:
            if "bind" in str(error):
                raise PortTaken(
                    f"Process {ranks.rank} of {ranks.size} cannot listen on the port it was assigned.",
                    why=str(error),
                    do="start the processes again with different ports (mlx.launch --starting-port)",
                ) from error
            # The last rank starts by connecting, so a retry does not disturb a partly connected ring.
            last = ranks.rank == ranks.size - 1
            if "connect" in str(error) and last and time.monotonic() - started < limits.connect_s:
                continue
            raise UserError(
                f"Process {ranks.rank} of {ranks.size} cannot connect to the others.",
                why=str(error),
                do="start all of them within a few seconds, with addresses at which they can reach each other",
            ) from error
        assert (group.rank(), group.size()) == (ranks.rank, ranks.size)
        return RingGroup(ranks, group)
