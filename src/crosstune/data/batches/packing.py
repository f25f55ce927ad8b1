"""Pack whole documents into rows: first fit over a window of open rows, in stream order."""

from __future__ import annotations

import math
import threading
from array import array
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from crosstune.data.batches.epoch_order import Mixture, epoch_order

OPEN_ROWS = 64
"""Number of rows filled at the same time. With more rows, packing is denser, but documents move further from their order."""


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Rows of documents, stored as two flat arrays."""

    documents: NDArray[np.int64]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)

    def row(self, number: int) -> NDArray[np.int64]:
        start = int(self.ends[number - 1]) if number else 0
        return self.documents[start : int(self.ends[number])]


def pack(
    order: NDArray[np.int64], lengths: NDArray[np.int64], *, capacity: int, num_open: int = OPEN_ROWS
) -> PackedRows:
    """Pack the documents in `order`, each into the first open row with room; `lengths[d]` is the length of document d.

    A row is complete when it is full, or when it is the oldest and a document needs a new row.
    """
    documents, ends = array("q"), array("q")
    rows: list[list[int]] = []
    free = np.zeros(num_open, dtype=np.int64)

    def close(place: int) -> None:
        documents.extend(rows.pop(place))
        ends.append(len(documents))
        free[place : len(rows)] = free[place + 1 : len(rows) + 1]

    for document in order.tolist():
        length = int(lengths[document])
        assert 0 < length <= capacity, f"document {document} has {length} of {capacity} tokens"
        fits = free[: len(rows)] >= length
        place = int(fits.argmax()) if fits.any() else len(rows)
        if place == num_open:
            close(0)
            place -= 1
        if place == len(rows):
            rows.append([])
            free[place] = capacity
        rows[place].append(document)
        free[place] -= length
        if free[place] == 0:
            close(place)
    while rows:
        close(0)
    return PackedRows(
        documents=np.frombuffer(documents, dtype=np.int64), ends=np.frombuffer(ends, dtype=np.int64)
    )


class PackedOrder:
    """The packed rows of all epochs in sequence. Each epoch is packed separately, so any row depends only on the seed
    and its position."""

    def __init__(
        self, lengths: NDArray[np.int64], *, capacity: int, seed: int, mixture: Mixture | None = None
    ) -> None:
        self.lengths, self.capacity, self.seed, self.mixture = lengths, capacity, seed, mixture
        self._fits_one_row = mixture is None and int(lengths.sum()) <= capacity
        self._starts = [0]
        self._packed: dict[int, PackedRows] = {}
        self._lock = threading.RLock()  # a thread prepares the next steps

    def epoch(self, number: int) -> PackedRows:
        with self._lock:
            if number not in self._packed:
                # A step needs at most the end of one epoch and the start of the next, unless epochs are tiny.
                self._packed = {key: rows for key, rows in self._packed.items() if key >= number - 1}
                self._packed[number] = pack(self._order(number), self.lengths, capacity=self.capacity)
            return self._packed[number]

    def num_rows(self, num_epochs: float, *, at_most: int | None = None) -> int:
        """Return the number of rows in `num_epochs` epochs; stop counting at `at_most`."""
        whole = math.floor(num_epochs)
        starts = self._starts_of(num_epochs=math.ceil(num_epochs), num_rows=at_most)
        total = starts[min(whole, len(starts) - 1)]
        if whole < num_epochs and whole + 1 < len(starts):
            total += round((starts[whole + 1] - starts[whole]) * (num_epochs - whole))
        return total if at_most is None else min(total, at_most)

    def rows(self, first: int, last: int) -> list[NDArray[np.int64]]:
        """Return the documents of rows `first` to `last` (exclusive), counted over all epochs."""
        places = map(self.place, range(first, last))
        return [self.epoch(epoch).row(row) for epoch, row in places]

    def place(self, row: int) -> tuple[int, int]:
        """Return the epoch of a row, and its index in that epoch."""
        starts = self._starts_of(num_rows=row)
        epoch = bisect_right(starts, row) - 1
        return epoch, row - starts[epoch]

    def fill(self) -> float:
        """Return the fraction of the first epoch's rows that is filled with tokens."""
        return float(self.lengths[self._order(0)].sum()) / (self._count(0) * self.capacity)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        return epoch_order(len(self.lengths), seed=self.seed, epoch=epoch, mixture=self.mixture)

    def _starts_of(self, *, num_epochs: int | None = None, num_rows: int | None = None) -> list[int]:
        """Return the first row of each epoch, up to the end of `num_epochs` epochs or of the first `num_rows` rows."""
        with self._lock:
            while (num_epochs is None or len(self._starts) <= num_epochs) and (
                num_rows is None or self._starts[-1] < num_rows
            ):
                self._starts.append(self._starts[-1] + self._count(len(self._starts) - 1))
            return self._starts

    def _count(self, epoch: int) -> int:
        return 1 if self._fits_one_row else len(self.epoch(epoch))
