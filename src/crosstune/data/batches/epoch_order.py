"""Shuffle the examples of an epoch by the seed, from one source or from several weighted sources."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# Separates the random streams of sources and epochs; both use the same seed.
_SOURCE_KEY = 2**40


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Consecutive sources of a corpus, and their weights. An epoch has as many rows as all sources together, divided by
    weight. A source is reshuffled only when all of its rows have been used, even in the middle of an epoch."""

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    """One for each source; only their ratios matter."""

    def __post_init__(self) -> None:
        assert len(self.sizes) == len(self.weights) and all(self.sizes), "every source has rows and a weight"

    @property
    def shares(self) -> tuple[float, ...]:
        return tuple(weight / sum(self.weights) for weight in self.weights)

    def counts(self) -> list[int]:
        """Return the number of rows of an epoch from each source: the fractions, rounded by largest remainder."""
        num_rows = sum(self.sizes)
        exact = [share * num_rows for share in self.shares]
        counts = [int(value) for value in exact]
        by_remainder = sorted(range(len(exact)), key=lambda place: (counts[place] - exact[place], place))
        for place in by_remainder[: num_rows - sum(counts)]:
            counts[place] += 1
        return counts

    def epoch(self, number: int, *, seed: int) -> NDArray[np.int64]:
        """Return the examples of an epoch, not shuffled between the sources."""
        starts = np.cumsum([0, *self.sizes[:-1]])
        drawn = [
            start + _draw(size, source=source, first=number * count, count=count, seed=seed)
            for source, (start, size, count) in enumerate(zip(starts, self.sizes, self.counts(), strict=True))
        ]
        return np.concatenate(drawn)

    def identity(self) -> str:
        return ", ".join(
            f"{share!r} from {size} rows" for size, share in zip(self.sizes, self.shares, strict=True)
        )


def _draw(size: int, *, source: int, first: int, count: int, seed: int) -> NDArray[np.int64]:
    """Return `count` rows of the stream of a source from position `first`: its permutations, one after another."""
    last = first + count
    pieces = [
        _pass(size, source=source, number=number, seed=seed)[
            max(first - number * size, 0) : min(last - number * size, size)
        ]
        for number in range(first // size, -(-last // size))
    ]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)


@lru_cache(maxsize=8)
def _pass(size: int, *, source: int, number: int, seed: int) -> NDArray[np.int64]:
    key = (seed, _SOURCE_KEY * (source + 1) + number)
    return np.random.Generator(np.random.Philox(key=key)).permutation(size)


@lru_cache(maxsize=2)
def epoch_order(
    num_examples: int, *, seed: int, epoch: int, mixture: Mixture | None = None
) -> NDArray[np.int64]:
    """Return the shuffled examples of an epoch: each once, or as a mixture draws them."""
    order = np.random.Generator(np.random.Philox(key=(seed, epoch))).permutation(num_examples)
    return order if mixture is None else mixture.epoch(epoch, seed=seed)[order]
