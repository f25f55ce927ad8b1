"""Post and read the state of each rank: what it does, and since when it has made no progress."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class State:
    """The last post of a rank about itself."""

    rank: int
    host: str
    beat: int
    """Counts up with every post: one that stays the same is of a stopped process."""
    doing: str
    at: str
    """The innermost place in the code."""
    still_s: float
    """For how long its main thread has been at this place."""
    waits: bool
    """True if it waits in a collective, so for another rank."""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> State:
        return cls(**json.loads(text))

    def sentence(self) -> str:
        at = f", {self.at}" if self.at else ""
        return f"rank {self.rank} (host {self.host}): {self.doing}{at}"


class Board(Protocol):
    def post(self, state: State) -> None: ...

    def read(self) -> Mapping[int, State]:
        """Return the last state of each rank that can be seen here."""
        ...


class BoardLost(Exception):
    """The board is gone, as its process is."""


class FolderBoard:
    """A board for the ranks of one machine and their launcher, in the launcher's private folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def post(self, state: State) -> None:
        path = self._folder / f"rank-{state.rank}.state"
        staged = path.with_suffix(".new")
        with contextlib.suppress(OSError):  # the launcher has removed its folder, or the disk is full
            staged.write_text(state.to_text(), encoding="utf-8")
            staged.replace(path)

    def read(self) -> dict[int, State]:
        states: dict[int, State] = {}
        for path in self._folder.glob("rank-*.state"):
            with contextlib.suppress(OSError, ValueError, TypeError):
                state = State.from_text(path.read_text(encoding="utf-8"))
                states[state.rank] = state
        return states

    def clear(self) -> None:
        """Forget the ranks of an earlier attempt."""
        for path in self._folder.glob("rank-*.state"):
            path.unlink(missing_ok=True)
