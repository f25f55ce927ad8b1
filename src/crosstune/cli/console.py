"""A rich console that escapes control characters in the texts it prints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from crosstune.cli.escape_controls import raw_stream
from crosstune.core.control_characters import printable


class EscapingConsole(Console):
    """A rich console whose own styles reach the terminal, but no control character of a text."""

    def __init__(self, *, file: TextIO, **settings: Any) -> None:
        super().__init__(file=raw_stream(file), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # rich removes the returns of a text, so a segment of one is the end that a call asked for.
            if segment.control or segment.text == "\r":
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)
