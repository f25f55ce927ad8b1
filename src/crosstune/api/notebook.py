"""Show runs, plans and live progress in the output of a notebook cell."""

from __future__ import annotations

import base64
import math
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from markupsafe import Markup

from crosstune.cli.terminal.screen import BarLine
from crosstune.core.events import Evaluated, Event, StepMetrics
from crosstune.core.safe_text import printable
from crosstune.report.charts import Chart, Series
from crosstune.report.series import Point
from crosstune.report.template import draw_file

UPDATE_S = 0.25
"""The shortest time between two updates of the live cell."""
_FRAME = Markup(
    '<iframe sandbox="allow-scripts" style="width: 100%; height: 40rem; border: 0" srcdoc="{}"></iframe>'
)
_ROW = Markup('<tr><th style="text-align: left">{}</th><td style="text-align: left">{}</td></tr>')
_LIVE = Markup(
    '<div><progress max="1" value="{}"></progress> <b>{}</b> <span style="white-space: pre">{}</span></div>'
)
_CURVES = Markup(
    '<img src="data:image/svg+xml;base64,{}" alt="loss" style="max-width: 100%">'
    "<div><small>loss {:.4g} to {:.4g} over {:,} steps{}</small></div>"
)


def framed(page: str) -> str:
    """Return a page in a frame: its style does not reach the notebook, and nothing in it may."""
    return str(_FRAME.format(page))


def table(lines: Iterable[str], *, width: int) -> str:
    """Return lines as a table with two columns; the first has `width` characters."""
    rows = [_ROW.format(printable(line[:width].strip()), printable(line[width:].strip())) for line in lines]
    return str(Markup("<table>{}</table>").format(Markup("").join(rows)))


def has_kernel() -> bool:
    """Return True in a notebook. A process with a kernel has imported IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class LiveCell:
    """A bar and the curve of the loss, updated in place in the output of the running cell."""

    def __init__(self) -> None:
        self.losses: list[Point] = []
        self.evaluated: list[Point] = []
        self._display: Any = None
        self._last: tuple[str, float] = ("", 0.0)
        """The title of the last update, and its time."""

    def on_step(self, metrics: StepMetrics) -> None:
        if (loss := metrics["loss"]) is not None and math.isfinite(loss):
            self.losses.append((metrics["step"], loss))

    def on_event(self, event: Event) -> None:
        if isinstance(event, Evaluated) and math.isfinite(loss := event.metrics.get("loss", math.nan)):
            self.evaluated.append((event.step, loss))

    def show(self, line: BarLine) -> None:
        kind, at = self._last
        if line.title.split()[:1] == kind.split()[:1] and time.monotonic() - at < UPDATE_S:
            return
        self._last = line.title, time.monotonic()
        words = "   ".join(line.figures)
        self._put(
            _LIVE.format(f"{line.share:.3f}", printable(line.title), printable(words)),
            f"{line.title}  {words}",
        )

    def clear(self) -> None:
        if self._display is not None:
            self._put(Markup(), "")

    def _put(self, bar: Markup, text: str) -> None:
        from IPython.display import display

        shown = {"text/html": bar + loss_curves(self.losses, self.evaluated), "text/plain": text}
        if self._display is None:
            self._display = display(shown, raw=True, display_id=True)
        else:
            self._display.update(shown, raw=True)


def loss_curves(losses: Sequence[Point], evaluated: Sequence[Point]) -> Markup:
    """Return the curves of the training and the evaluation loss; empty before the second step."""
    if len(losses) < 2:
        return Markup()
    series = [Series(label="training", points=losses)]
    if evaluated:
        series.append(Series(label="evaluation", points=evaluated, look="marked", color=2))
    chart = base64.b64encode(draw_file(Chart(title="Loss", series=series, shape="wide")).encode()).decode()
    held_out = f"; evaluation {evaluated[-1][1]:.4g}" if evaluated else ""
    return _CURVES.format(chart, losses[0][1], losses[-1][1], losses[-1][0], held_out)
