"""Several processes that train together: which of them this one is, and what they can say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The place of one process among those of a run."""

    engine: str = ""
    """Whose collectives they talk through."""
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Its place among those on the same host."""
    local_size: int = 1
    launcher: int | None = None
    """The process that started it, where that was crosstune's own launcher."""

    @property
    def first(self) -> bool:
        """The one that writes the run folder and talks to the user."""
        return self.rank == 0


class Group(Protocol):
    """The processes of a run, connected. Every method is called by all of them, in the same order."""

    ranks: Ranks

    def any(self, flag: bool) -> bool:
        """Whether one of them says so."""
        ...

    def same(self, text: str) -> bool:
        """Whether all of them have the same text."""
        ...

    def share(self, text: str) -> str:
        """The text of the first."""
        ...

    def meet(self) -> None:
        """Returns when all of them are here."""
        ...


class Alone:
    """The group of a run that has one process."""

    ranks = Ranks()

    def any(self, flag: bool) -> bool:
        return flag

    def same(self, text: str) -> bool:
        return True

    def share(self, text: str) -> str:
        return text

    def meet(self) -> None:
        return None
