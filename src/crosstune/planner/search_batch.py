"""Find the largest micro-batch that fits, for `--batch_size auto`, with real passes over the longest rows.

The size is doubled while a pass fits, then bisected. A size that would not fit by linear extrapolation is not tried.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field

from crosstune.core.out_of_memory import OutOfMemory
from crosstune.core.protocols import Batch, Session
from crosstune.estimate.memory import GIB
from crosstune.process.ranks import Group

MAX_ROWS = 512
"""Larger micro-batches are hardly faster, but change the training."""
STEPS_PER_EPOCH = 8
"""An epoch keeps at least this many steps."""
FINENESS = 8
"""The search ends when the remaining interval is this fraction of the size."""


@dataclass(kw_only=True)
class BatchSizeFound:
    batch_size: int
    num_tried: int
    peak_bytes: int
    """The peak of a pass with this size, including optimizer state."""
    limit_bytes: int
    at_most: int

    def sentence(self) -> str:
        """Return why the size was chosen."""
        use = f"{self.peak_bytes / GIB:.2f} of {self.limit_bytes / GIB:.2f} GiB to use"
        if self.batch_size >= self.at_most:
            return f"found by {self.num_tried} real passes: the largest size searched for, {use}"
        return f"found by {self.num_tried} real passes over the longest rows: {use}; more rows would not fit"


@dataclass(kw_only=True)
class BatchSearch:
    session: Session
    longest_batch: Callable[[int], Batch]
    group: Group
    limit_bytes: int
    reserve_bytes: int
    """The optimizer state, allocated after the first pass."""
    at_most: int
    _tried: dict[int, int] = field(default_factory=dict)
    """Rows -> the peak bytes of their pass, for the sizes that fit."""
    _num_tried: int = 0

    def run(self) -> BatchSizeFound:
        """Return the largest size that fits; raise OutOfMemory if one row does not fit."""
        good, size = 0, 1
        while size <= self.at_most and self._fits(size):
            good, size = size, min(2 * size, max(self.at_most, size + 1))
        if good == 0:
            raise OutOfMemory("one row does not fit")
        bad = size
        while bad - good > max(1, good // FINENESS):
            middle = (good + bad) // 2
            if self._fits(middle):
                good = middle
            else:
                bad = middle
        return BatchSizeFound(
            batch_size=good,
            num_tried=self._num_tried,
            peak_bytes=self._tried[good] + self.reserve_bytes,
            limit_bytes=self.limit_bytes,
            at_most=self.at_most,
        )

    def _fits(self, size: int) -> bool:
        """Return True if a pass over this many rows fits in every process. All processes try the same sizes."""
        used = self.session.memory().used_bytes
        if self._tried:
            largest = max(self._tried)
            growth = max(0, self._tried[largest] - used) * size / largest
            if self.group.any(used + growth + self.reserve_bytes > self.limit_bytes):
                return False
        peak = self._try(size)
        gc.collect()  # frames of an error keep the tensors of the pass alive
        if self.group.any(peak is None or peak + self.reserve_bytes > self.limit_bytes):
            return False
        assert peak is not None
        self._tried[size] = peak
        return True

    def _try(self, size: int) -> int | None:
        """Return the peak memory of a pass over this many rows; None if it does not fit."""
        self._num_tried += 1
        prepared = self.session.prepare(self.longest_batch(size))
        getattr(self.session, "reset_peak", lambda: None)()
        try:
            self.session.backward([prepared] * self.group.ranks.size)
            peak = self.session.memory().peak_bytes
        except OutOfMemory as error:
            if self.group.ranks.size > 1 and not error.shared:
                raise
            peak = None
        self.session.discard()
        return peak


def max_rows(num_rows: int, *, micro_batches: int, rows_per_step: int, world_size: int) -> int:
    """Return the largest size to search for: an epoch keeps a few steps, or a step keeps --rows_per_step."""
    world = max(1, world_size)
    if rows_per_step:
        return max(1, min(MAX_ROWS, rows_per_step // world))
    return max(1, min(MAX_ROWS, num_rows // (STEPS_PER_EPOCH * micro_batches * world)))
