"""Define the progress callback for long operations on models."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called with the stage ('wait', 'download', 'convert', 'verify') and bytes; `total` is None when unknown."""

    def __call__(self, stage: str, done: int, total: int | None, /) -> None: ...


def silent(stage: str, done: int, total: int | None, /) -> None:
    """Report no progress."""
