"""Trained weights and optimizer moments of a session as arrays on the host, and back."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from crosstune.core.errors import UserError
from crosstune.core.protocols import Array
from crosstune.mlx_engine.optimizer import Optimizer

COUNT = "step"
Moments = Mapping[str, Mapping[str, Array]]


def to_host(array: mx.array) -> Array:
    """A copy that the next step does not change."""
    return np.array(array, copy=True)


def export_moments(optimizer: Optimizer) -> Moments:
    found: dict[str, dict[str, Array]] = {}
    for name, slots in optimizer.slots.items():
        for slot, array in slots.items():
            found.setdefault(slot, {})[name] = to_host(array)
        if optimizer.rule.counts:
            found.setdefault(COUNT, {})[name] = np.array(optimizer.counts[name], dtype=np.float32)
    return found


def import_moments(optimizer: Optimizer, masters: Mapping[str, mx.array], moments: Moments) -> None:
    slots: dict[str, dict[str, mx.array]] = {}
    counts: dict[str, int] = {}
    for name, master in masters.items():
        expected = {slot: array.shape for slot, array in optimizer.rule.start(master).items()}
        given = {slot: arrays[name] for slot, arrays in moments.items() if name in arrays}
        count = given.pop(COUNT, None)
        if not given and count is None:
            continue
        if {slot: array.shape for slot, array in given.items()} != expected:
            raise UserError(
                "The optimizer's state does not fit.",
                why=f"for {name} it holds {', '.join(sorted(given)) or 'nothing'}, and this optimizer keeps "
                f"{', '.join(sorted(expected)) or 'nothing'}.",
                do="continue with the --optimizer of the run it is from",
            )
        slots[name] = {slot: mx.array(np.asarray(array, dtype=np.float32)) for slot, array in given.items()}
        counts[name] = int(count) if count is not None else 0
    optimizer.slots, optimizer.counts = slots, counts
