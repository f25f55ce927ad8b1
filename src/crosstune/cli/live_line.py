"""Show what is going on in one line of a terminal that is rewritten in place."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from crosstune.core.control_characters import printable

MIN_BAR, MAX_BAR = 6, 30
NARROW = 60
REFRESH_PER_SECOND = 5


@dataclass(frozen=True, kw_only=True)
class BarLine:
    """A title, a bar and some figures, the most important ones first: those that do not fit are left out."""

    title: str
    short_title: str = ""
    """The title on a narrow terminal."""
    share: float
    """The finished share of the work, from 0 to 1."""
    figures: Sequence[str] = ()

    def render(self, width: int, *, ascii_only: bool = False) -> Text:
        """Return one line of at most `width` columns, with a whole bar if a title of its length allows one."""
        narrow = bool(self.short_title) and width < NARROW
        title = _shorten(printable(self.short_title if narrow else self.title), width - MIN_BAR - 1)
        shown = [printable(word) for word in self.figures]
        while shown and cell_len(title) + MIN_BAR + 1 + sum(cell_len(word) + 2 for word in shown) > width:
            shown.pop()
        used = cell_len(title) + 1 + sum(cell_len(word) + 2 for word in shown)
        length = max(0, min(MAX_BAR, width - used))
        full = round(length * min(1.0, max(0.0, self.share)))
        done, left = ("#", "-") if ascii_only else ("━", "─")  # told apart without colours too
        bar = [
            (done * full, "green" if self.share >= 1 else "cyan"),
            (left * (length - full), "bright_black"),
        ]
        return Text.assemble(title, " ", *bar, *(f"  {word}" for word in shown), no_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # One column stays free: terminals differ in what they do after writing the last one.
        yield self.render(options.max_width - 1, ascii_only=options.ascii_only)


class LiveLine:
    """The last line of a terminal, rewritten as work proceeds; lines printed on the console appear above it."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None

    @property
    def is_shown(self) -> bool:
        return self._live is not None

    def show(self, line: BarLine) -> None:
        if self._live is None:
            self._live = Live(
                console=self.console,
                refresh_per_second=REFRESH_PER_SECOND,
                transient=True,
                # Text printed by others goes above the line, unless it goes to a file.
                redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
                redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),
            )
            self._live.update(line)
            self._live.start(refresh=True)
        else:
            self._live.update(line)

    def clear(self) -> None:
        """Remove the line."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _shorten(text: str, width: int) -> str:
    """Return `text`, without its beginning when it is wider than `width`: the end of a path says the most."""
    if cell_len(text) <= width:
        return text
    words = text.split(" ")
    while len(words) > 1 and cell_len(" ".join(words)) > width - 4:
        words.pop(0)
    return "... " + " ".join(words) if cell_len(" ".join(words)) <= width - 4 else words[-1][-max(1, width) :]
