"""How long work on a model tells its caller where it stands."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called often, with the stage ('wait', 'download', 'convert', 'verify') and bytes; total is None when unknown."""

    def __call__(self, stage: str, done: int, total: int | None, /) -> None: ...


def silent(stage: str, done: int, total: int | None, /) -> None:
    """The progress of a caller who did not ask for any."""
