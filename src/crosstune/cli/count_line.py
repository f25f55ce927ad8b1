"""Show how far counted work is, with its rate and the time left: in place on a terminal, as lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from crosstune.cli.live_line import BarLine, LiveLine
from crosstune.cli.output import Output
from crosstune.cli.units import count, duration, size

_LINE_EVERY_S = 10.0


class CountLine:
    """Progress of one stage after another."""

    def __init__(self) -> None:
        self.output = Output()
        self._live = LiveLine(self.output.console)
        self._stage, self._started, self._printed = "", 0.0, 0.0

    def __enter__(self) -> CountLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.clear()

    def show(self, stage: str, done: int, total: int | None, *, unit: str) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._started, self._printed = stage, now, now
        rate = done / max(1e-9, now - self._started)
        shown = size if unit == "bytes" else lambda number: f"{count(int(number))} {unit}"
        figures = [f"{shown(done)}", f"{shown(rate)}/s"]
        if total and rate > 0:
            figures.append(f"left {duration((total - done) / rate)}")
        if self.output.is_terminal:
            self._live.show(BarLine(title=stage, share=done / total if total else 0.0, figures=figures))
        elif now - self._printed >= _LINE_EVERY_S:
            self._printed = now
            self.output.line("  ".join([stage, *figures]))
