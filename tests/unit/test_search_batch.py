"""The search of `--batch_size auto`, over a session with a known memory."""

from __future__ import annotations

from typing import Any

import pytest

from crosstune.core.out_of_memory import OutOfMemory
from crosstune.core.protocols import Backward, Memory, PreparedBatch
from crosstune.process.ranks import SingleProcess
from crosstune.runs.find_batch import BatchSearch, max_rows


class Measured:
    """A session whose passes need 100 bytes, and 10 for each row; more than `most` rows fail."""

    def __init__(self, most: int = 10**9) -> None:
        self.most, self.tried, self.pending, self.peak = most, list[int](), 0, 100

    def prepare(self, batch: Any) -> PreparedBatch:
        return PreparedBatch(weight=batch, num_tokens=batch, arrays={})

    def backward(self, window: Any, *, loss_scale: float = 1.0) -> Backward:
        self.pending = window[0].weight
        self.tried.append(self.pending)
        if self.pending > self.most:
            raise OutOfMemory("no room")
        self.peak = 100 + 10 * self.pending
        return Backward(loss=1.0, grad_norm=1.0, weight=1, num_tokens=1)

    def discard(self) -> None:
        self.pending = 0

    def memory(self) -> Memory:
        return Memory(used_bytes=100, peak_bytes=self.peak)

    def reset_peak(self) -> None:
        self.peak = 100


def search(session: Any, *, limit: int, at_most: int = 512) -> int:
    found = BatchSearch(
        session=session,
        longest_batch=lambda size: size,  # type: ignore[arg-type, return-value]
        group=SingleProcess(),
        limit_bytes=limit,
        reserve_bytes=50,
        at_most=at_most,
    ).run()
    assert session.pending == 0, "no gradient is left"
    return found


def test_the_size_is_doubled_and_bisected_and_no_pass_exceeds_the_limit() -> None:
    session = Measured()
    assert search(session, limit=100 + 50 + 10 * 23) in (22, 23)
    assert max(session.tried) <= 23 and session.tried[:5] == [1, 2, 4, 8, 16]


def test_an_allocation_that_fails_is_a_size_that_does_not_fit() -> None:
    session = Measured(most=11)
    assert search(session, limit=10**9) in (10, 11)
    with pytest.raises(OutOfMemory, match="not enough memory"):
        search(Measured(most=0), limit=10**9)


def test_the_search_ends_where_more_rows_are_not_wanted() -> None:
    session = Measured()
    assert search(session, limit=10**9, at_most=12) == 12
    assert session.tried == [1, 2, 4, 8, 12]
    assert max_rows(1000, micro_batches=1, rows_per_step=0, world_size=1) == 125
    assert max_rows(1000, micro_batches=5, rows_per_step=0, world_size=5) == 5
    assert max_rows(1000, micro_batches=1, rows_per_step=64, world_size=2) == 32
    assert max_rows(3, micro_batches=1, rows_per_step=0, world_size=1) == 1
