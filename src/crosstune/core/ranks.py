"""Define the rank of a process and the communication between the processes of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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
    launcher: int | None = None
    """The id of the parent process, when that is crosstune's own launcher."""

    @property
    def first(self) -> bool:
        """True for the process that writes the run folder and prints."""
        return self.rank == 0


class Group(Protocol):
    """The connected processes of a run. Every rank makes the same calls in the same order."""

    ranks: Ranks

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


class Alone:
    """The group of a run with one process."""

    ranks = Ranks()

    def any(self, flag: bool) -> bool:
        return flag

    def same(self, text: str) -> bool:
        return True

    def share(self, text: str) -> str:
        return text

    def meet(self) -> None:
        return None
