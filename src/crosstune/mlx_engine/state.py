"""Export and import optimizer moments as host arrays."""

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
    """Return a copy that later steps do not change."""
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
        stored = {slot: arrays[name] for slot, arrays in moments.items() if name in arrays}
        count = stored.pop(COUNT, None)
        if not stored and count is None:
            continue
        if {slot: array.shape for slot, array in stored.items()} != expected:
            raise UserError(
                "The optimizer's state does not fit.",
                why=f"for {name} it holds {', '.join(sorted(stored)) or 'nothing'}, and this optimizer has "
                f"{', '.join(sorted(expected)) or 'nothing'}.",
                do="continue with the --optimizer of the original run",
            )
        slots[name] = {slot: mx.array(np.asarray(array, dtype=np.float32)) for slot, array in stored.items()}
        counts[name] = int(count) if count is not None else 0
    optimizer.slots, optimizer.counts = slots, counts
