"""Define the rank of a process and the communication between the processes of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from crosstune.core.activity import Activity


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The rank of one process in a run."""

    engine: str = ""
    """The engine whose collectives the processes use."""
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
    """The private folder of crosstune's own launcher on this host, for notes to it."""
    attempt: int = 0
    """How often the launcher has restarted the processes."""
    master_addr: str = ""
    master_port: int = 0
    """Where the first process, or its launcher, has the store through which the processes find each other."""
    serves_store: bool = False
    """Whether this process serves the store; torchrun's agent does it for its processes."""

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
    """How long the processes of a run wait for each other, in seconds."""

    connect_s: float = 300.0
    """Until all have found each other."""
    collective_s: float = 1800.0
    """In one collective, and in one piece of work without a sign of progress."""
    heartbeat_s: float = 1800.0
    """Until NCCL's own watchdog thread counts as hung."""
    debug: bool = False
    """Whether operation, shape and dtype of each collective are compared between the processes first."""


class Group(Protocol):
    """The connected processes of a run. Every rank makes the same calls in the same order."""

    ranks: Ranks
    activity: Activity
    """What this process does now, for the watchdog."""

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        ...

    def same(self, text: str) -> bool:
        """Return whether all ranks have the same text."""
        ...

    def share(self, text: str) -> str:
        """Return the text of rank 0."""
        ...

    def meet(self) -> None:
        """Wait until all ranks have called this."""
        ...


class SingleProcess:
    """The group of a run with one process."""

    ranks = Ranks()

    def __init__(self) -> None:
        self.activity = Activity()

    def any(self, flag: bool) -> bool:
        return flag

    def same(self, text: str) -> bool:
        return True

    def share(self, text: str) -> str:
        return text

    def meet(self) -> None:
        return None


def sum_exactly(numbers: Sequence[float]) -> float:
    """Return the sum, rounded once; nan for infinities of both signs, for which math.fsum raises."""
    if math.inf in numbers and -math.inf in numbers:
        return math.nan
    return math.fsum(numbers)
