"""Print lines for people: folded at words to the width of a terminal, whole elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from crosstune.cli.streams import StyledStream, fold, styled
from crosstune.core.control_characters import printable

WARNING, ERROR, GOOD, QUIET, STRONG = "yellow", "bold red", "green", "dim", "bold"


class EscapingConsole(Console):
    """A rich console whose own styles reach the terminal, but no control character of a text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # rich removes the returns of a text, so a segment of one is the end that a call asked for.
            if segment.control or segment.text == "\r":
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


class Output:
    """A stream for people. Colours follow rich's rules: none in a file, with NO_COLOR, or with TERM=dumb."""

    def __init__(self, stream: TextIO | None = None) -> None:
        # A notebook gets plain text: rich would display an HTML element for every line.
        self.console = EscapingConsole(
            file=styled(stream or sys.stderr),
            highlight=False,
            soft_wrap=True,
            force_jupyter=False,
        )

    @property
    def is_terminal(self) -> bool:
        """True if a line can be rewritten in place."""
        return self.console.is_terminal and not self.console.is_dumb_terminal

    def drain(self) -> None:
        """Wait a moment until a terminal has taken what was printed."""
        if isinstance(self.console.file, StyledStream):
            self.console.file.drain()

    def line(self, text: str, *, style: str | None = None, label_style: str | None = None) -> None:
        """Print a text line by line. `label_style` is for the first word of each line alone."""
        # Before folding, as an escape is longer than its character; rich would drop some without a trace.
        for line in printable(text).split("\n"):
            folded = fold(line, self.console.width) if self.console.is_terminal else [line]
            printed = Text("\n".join(folded), style=style or "")
            if label_style is not None:
                printed.stylize(label_style, 0, len(line) - len(line.lstrip()) + len(line.split(" ")[0]))
            self.console.print(printed)


def print_line(text: str, *, style: str | None = None) -> None:
    """Print a text on standard output."""
    Output(sys.stdout).line(text, style=style)


def print_error(lines: Sequence[str]) -> None:
    """Print an error on standard error: the first line of each problem in red, reasons and remedies below it."""
    output = Output()
    for line in lines:
        indented = line.startswith("  ")
        output.line(line if indented else f"crosstune: {line}", style=None if indented else ERROR)
