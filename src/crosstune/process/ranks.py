"""Define the rank of a process and the communication between the processes of a run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from crosstune.core.errors import UserError
from crosstune.core.events import StepMetrics

if TYPE_CHECKING:
    from crosstune.core.protocols import Array

T = TypeVar("T")
BUCKET_BYTES = 64 * 2**20
MAXIMUM = "/max"
"""Ending of the metrics that are a maximum over the batches of a step, of numbers of 0 or more; the others are means."""


class Activity:
    """The current activity of this process, set by one thread and read by others."""

    def __init__(self) -> None:
        self.name = "starting"

    def start(self, name: str) -> None:
        """Set the activity, such as `step 12: backward`."""
        self.name = name

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Set the activity in the `with` block."""
        before, self.name = self.name, name
        try:
            yield
        finally:
            self.name = before


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The rank of one process in a run."""

    engine: str = ""
    """The engine whose collectives are used."""
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """The rank among the processes of the same host."""
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    host: str = ""
    """The name of this host, for messages."""
    launcher: int | None = None
    """The id of the parent process, when that is crosstune's own launcher."""
    launch_folder: str | None = None
    """The private folder of crosstune's own launcher on this host, for messages to it."""
    attempt: int = 0
    """The number of restarts by the launcher."""
    master_addr: str = ""
    master_port: int = 0
    """Address of the store through which the processes find each other."""
    serves_store: bool = False
    """True if this process serves the store; under torchrun, the agent does."""

    @property
    def first(self) -> bool:
        """True for the process that writes the run folder and prints."""
        return self.rank == 0

    @property
    def name(self) -> str:
        """The rank and its host, for messages."""
        return f"rank {self.rank} of {self.size}" + (f" (host {self.host})" if self.host else "")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Timeouts between the processes of a run, in seconds."""

    connect_s: float = 300.0
    """Until all have found each other."""
    collective_s: float = 1800.0
    """In one collective, and in one piece of work without a sign of progress."""
    heartbeat_s: float = 1800.0
    """Until NCCL's own watchdog thread counts as hung."""
    debug: bool = False
    """Compare operation, shape and dtype of each collective across ranks before it runs."""


@dataclass(frozen=True, kw_only=True)
class RankState:
    """The state that a rank last posted."""

    rank: int
    host: str
    beat: int
    """Grows with every post; a constant beat means a stopped process."""
    doing: str
    at: str
    still_s: float
    """Seconds that the main thread has been at this place."""
    waits: bool
    """True if it waits for another rank, in a collective."""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> RankState:
        return cls(**json.loads(text))

    def place(self) -> str:
        return f"{self.doing}{f', {self.at}' if self.at else ''}"

    def sentence(self) -> str:
        return f"rank {self.rank} (host {self.host}): {self.place()}"


class Board(Protocol):
    """A store in which ranks post their state for the others."""

    def post(self, state: RankState) -> None: ...

    def read(self) -> Mapping[int, RankState]:
        """Return the last state of each rank that posted."""


class BoardLost(Exception):
    """The board was lost with the process that served it."""


class Group:
    """The connected processes of a run. Every rank makes the same calls in the same order."""

    ranks: Ranks = Ranks()

    def __init__(self) -> None:
        self.activity = Activity()
        """The current work of this process, for the watchdog."""

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, all of the same length."""
        raise NotImplementedError

    def any(self, flag: bool) -> bool:
        """Return True if the flag is set on any rank."""
        return any(part != b"\0" for part in self.gather(b"\1" if flag else b"\0"))

    def all_equal(self, text: str) -> bool:
        """Return True if all ranks have the same string."""
        return len(set(self.gather(hashlib.sha256(text.encode()).digest()))) == 1

    def broadcast(self, text: str) -> str:
        """Broadcast a string from rank 0."""
        data = text.encode() if self.ranks.first else b""
        length = int(self.sum_numbers(len(data))[0])
        return self.gather(data.ljust(length, b"\0"))[0].decode()

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.any(False)

    def sum_numbers(self, *numbers: float) -> list[float]:
        """Sum each number over the ranks in double precision, bitwise equal on every rank."""
        layout = f"<{len(numbers)}d"
        rows = [struct.unpack(layout, part) for part in self.gather(struct.pack(layout, *numbers))]
        return [sum_exactly(column) for column in zip(*rows, strict=True)]

    def gather_vectors(self, own: Mapping[int, Array]) -> list[Array]:
        """Return the float32 vectors of all ranks in the order of their numbers."""
        import numpy as np  # not for `crosstune --help`

        data = b"".join(
            struct.pack("<qq", number, len(vector)) + vector.astype("<f4").tobytes()
            for number, vector in own.items()
        )
        lengths = [int.from_bytes(part, "little") for part in self.gather(len(data).to_bytes(8, "little"))]
        found: dict[int, Array] = {}
        for part, length in zip(self.gather(data.ljust(max(lengths), b"\0")), lengths, strict=True):
            start = 0
            while start < length:
                number, size = struct.unpack_from("<qq", part, start)
                found[number] = np.frombuffer(part, "<f4", count=size, offset=start + 16)
                start += 16 + 4 * size
        return [found[number] for number in sorted(found)]

    def open_board(self) -> Board | None:
        """Return the board of the group; None if it has none."""
        return None

    def remember(self, text: str) -> None:
        """Keep a string for the next attempt, if a launcher other than crosstune's starts it."""

    def recall(self) -> str:
        """Return the string that rank 0 kept in an earlier attempt; empty if none."""
        return ""

    def close(self) -> None:
        """Leave the group. Every rank calls this, outside of collectives."""


class SingleProcess(Group):
    """The group of a run with one process."""

    def gather(self, data: bytes) -> list[bytes]:
        return [data]


def check_metric_names(names: Sequence[str], *, weight_name: str) -> None:
    """Raise a UserError when a metric would replace a column of metrics.jsonl."""
    taken = {*StepMetrics.__annotations__, weight_name}
    if bad := sorted(taken.intersection(names)):
        raise UserError(
            f"A metric of the recipe's task cannot be called {bad[0]}.",
            why="metrics.jsonl already has a column of that name.",
            do="rename it in `metric_names` and in the result of `loss`",
        )


class MetricTotals:
    """Sums of a task's metrics and of their weights, over the batches of a step or an evaluation."""

    def __init__(self, names: Sequence[str]) -> None:
        self._sums: dict[str, tuple[Any, Any]] = dict.fromkeys(names, (0, 0))

    def add(self, sums: Mapping[str, tuple[Any, Any]]) -> None:
        if unknown := sums.keys() - self._sums.keys():
            raise UserError(
                f"The recipe's task returned the metric {min(unknown)}, which it does not declare.",
                why="every process must know the names of all metrics in advance.",
                do=f"add {min(unknown)} to its `metric_names`",
            )
        for name, (total, weight) in sums.items():
            before, found = self._sums[name], self.number(total)
            added = self.larger(before[0], found) if name.endswith(MAXIMUM) else before[0] + found
            self._sums[name] = (added, before[1] + self.number(weight))

    def means(self, group: Group | None = None) -> dict[str, float]:
        """Return the means across all ranks. All ranks have the same metrics."""
        numbers = self.read([number for pair in self._sums.values() for number in pair])
        return mean_metrics(list(self._sums), numbers, group)

    def number(self, value: Any) -> Any:
        """Return a value of the engine as a number to add to a total."""
        return float(value)

    def larger(self, before: Any, found: Any) -> Any:
        return max(before, found)

    def read(self, numbers: Sequence[Any]) -> list[float]:
        return list(numbers)


def mean_metrics(names: Sequence[str], numbers: Sequence[float], group: Group | None) -> dict[str, float]:
    """Return the metrics of a step from the sum and the weight of each on this rank."""
    totals, largest = list(numbers), dict[str, float]()
    tops = [name for name in names if name.endswith(MAXIMUM)]
    if group is not None and totals:
        if tops:
            layout = f"<{len(tops)}d"
            own = struct.pack(layout, *(numbers[2 * names.index(name)] for name in tops))
            parts = [struct.unpack(layout, part) for part in group.gather(own)]
            largest = dict(zip(tops, map(max, zip(*parts, strict=True)), strict=True))
        totals = group.sum_numbers(*totals)
    else:
        largest = {name: numbers[2 * names.index(name)] for name in tops}
    pairs = zip(totals[::2], totals[1::2], strict=True)
    return {
        name: math.nan if not weight else largest[name] if name in largest else total / weight
        for name, (total, weight) in zip(names, pairs, strict=True)
    }


def sum_exactly(numbers: Sequence[float]) -> float:
    """Return the sum, rounded once; nan for infinities of both signs."""
    if math.inf in numbers and -math.inf in numbers:
        return math.nan
    return math.fsum(numbers)


def buckets(arrays: Iterable[T], num_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the arrays that are reduced together, of up to BUCKET_BYTES: few messages and little extra memory."""
    bucket: list[T] = []
    for array in arrays:
        if bucket and sum(map(num_bytes, bucket)) + num_bytes(array) > BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append(array)
    if bucket:
        yield bucket
