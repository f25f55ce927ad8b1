"""Show the progress of a run: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import singledispatchmethod
from typing import Any, Protocol, TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from crosstune.cli.terminal.event_lines import event_lines
from crosstune.cli.terminal.figures import duration, figure, size
from crosstune.cli.terminal.output import GOOD, QUIET, STRONG, WARNING, Output
from crosstune.cli.terminal.streams import Stream
from crosstune.config.conditions import screen_in
from crosstune.config.schema import Config
from crosstune.core.events import (
    Evaluated,
    Evaluating,
    EvaluationStarted,
    Event,
    ModelProgress,
    Preparing,
    ResultSaved,
    StepMetrics,
    Stopped,
    Tokenizing,
    TrainingEnded,
    TrainingStarted,
)
from crosstune.core.safe_text import printable
from crosstune.report.formatting import terminal_metrics

MIN_BAR, MAX_BAR = 6, 30
QUIET_S = 1.0
"""Do not report an operation shorter than this."""
PLAIN_S = 10.0
"""Without a live line, report the progress of a long operation at this interval."""
MAX_STEP_LINES = 20
"""Approximate number of step lines per run without a live line and --log_every_n_steps; a silent minute adds a line."""
SILENT_S = 60.0
RECENT_STEPS = 20
"""Number of steps for the displayed speed and time left."""


def open_screen(
    config: Config, *, as_json: bool = False, quiet: bool = False, line: ProgressLine | None = None
) -> Screen:
    """Return the screen for a configuration. With `as_json`, standard output is reserved for the result."""
    shown = screen_in(config.log_to)
    stream: Any = sys.stdout if shown == "stdout" and not as_json else sys.stderr
    if stream is not None and not isinstance(stream, Stream) and stream.isatty():  # not from the command line
        stream = Stream(stream, keeps_return=True)
    if isinstance(stream, Stream):
        stream.unblock()
    screen = Screen(
        live=shown == "tqdm" and not quiet,
        every=config.log_every_n_steps if "log_every_n_steps" in config.sources else None,
        verbose=config.verbose,
        stream=stream,
        line=line,
    )
    screen.output.console.quiet = quiet
    return screen


class Screen:
    """Print events and steps. On a terminal, a bar shows step, loss, time left, speed and memory."""

    def __init__(
        self,
        *,
        live: bool,
        every: int | None = None,
        verbose: bool = False,
        stream: TextIO | None = None,
        line: ProgressLine | None = None,
    ) -> None:
        """`line` shows the bar, by default on the terminal. `every` is the interval of steps at which a line is printed, even
        above a live bar; by default it is chosen."""
        self.output = Output(stream)
        self._is_stdout = stream is not None and stream is sys.stdout
        self.live = live and (line is not None or self.output.is_terminal)
        self.every = every if every is not None else (1 if verbose else None)
        self.verbose = verbose
        self.num_steps = 0
        self._line: ProgressLine = line or LiveLine(self.output.console)
        self._bar: BarLine | None = None
        """The training bar, restored after an evaluation."""
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT_STEPS)
        """Seconds and tokens of recent steps; an average over the run would hide a slowdown."""
        self._is_warm = False
        self._last_step_line_at = -math.inf
        self._stage = ""
        self._stage_started, self._stage_first = 0.0, 0
        self._last_shown = 0.0
        self._last_metrics: dict[str, float] = {}

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._line.clear()
        self._bar = None

    def on_step(self, metrics: StepMetrics) -> None:
        step = metrics["step"]
        if self._recent and not self._is_warm:  # omit the first step, since it includes warm-up
            self._recent.clear()
            self._is_warm = True
        self._recent.append((metrics["step_s"], metrics["tokens"]))
        figures = self._figures(metrics)
        if self.live:
            self._show_training(step, figures)
        if self._line_due(step):
            self._last_step_line_at = time.monotonic()
            self.output.line("  ".join([f"step {step}/{self.num_steps}", *_with_samples(metrics, figures)]))

    def _show_training(self, step: int, figures: Sequence[str]) -> None:
        share = step / max(1, self.num_steps)
        self._bar = BarLine(title=f"step {step}/{self.num_steps}", share=share, figures=figures)
        self._line.show(self._bar)

    def _figures(self, metrics: StepMetrics) -> list[str]:
        """Return the figures of a step, the most important first; a narrow terminal omits the last."""
        loss = "skipped" if metrics["loss"] is None else f"{metrics['loss']:.4f}"
        reward: Any = dict(metrics).get("reward")
        seconds, tokens = (sum(column) for column in zip(*self._recent, strict=True))
        left = seconds / len(self._recent) * (self.num_steps - metrics["step"])
        return [
            f"loss {loss}",
            *([f"reward {reward:.3f}"] if reward is not None else []),
            f"left {duration(left)}",
            f"{tokens / max(seconds, 1e-9):,.0f} tok/s",
            f"mem {size(metrics['memory_bytes'])}",
            f"lr {metrics['lr']:.2e}",
            *([f"grad {metrics['grad_norm']:.3g}"] if metrics["grad_norm"] is not None else []),
            *([f"epoch {metrics['epoch']:.2f}"] if "epoch" in metrics else []),
        ]

    def _line_due(self, step: int) -> bool:
        if self.every is not None:
            return step % self.every == 0
        if self.live:
            return False
        every = max(1, math.ceil(self.num_steps / MAX_STEP_LINES))
        silent_s = time.monotonic() - self._last_step_line_at
        return step % every == 0 or step == self.num_steps or silent_s >= SILENT_S

    @singledispatchmethod
    def on_event(self, event: Event) -> None:
        """Print an event's lines, if any."""
        self._print_event(event)

    def _print_event(self, event: Event) -> None:
        for text, style in event_lines(event):
            self.output.line(text, style=style)

    @on_event.register
    def _on_preparing(self, event: Preparing) -> None:
        if not self._is_stdout:  # its lines must not change between versions
            self.output.line(f"  {event.doing} ...", style=QUIET)

    @on_event.register
    def _on_model_progress(self, event: ModelProgress) -> None:
        amount = _part(event.done, event.total)
        self.show_stage(f"model    {event.model}: {event.stage}", event.done, event.total, [amount])

    @on_event.register
    def _on_tokenizing(self, event: Tokenizing) -> None:
        done, total = event.done_bytes, event.total_bytes
        amounts = [f"{event.examples:,} examples", _part(done, total)]
        self.show_stage(f"tokens   {event.source}", done, total, amounts)

    def show_stage(
        self,
        title: str,
        done: int,
        total: int | None,
        amounts: Sequence[str],
        *,
        unit: Callable[[float], str] = size,
    ) -> None:
        """Show the progress of counted work and leave one line; print nothing if it ends within QUIET_S."""
        now = time.monotonic()
        if title != self._stage:
            self._stage, self._stage_started, self._last_shown = title, now, now - PLAIN_S
            self._stage_first = done  # an earlier process finished these
        seconds = now - self._stage_started
        if total is not None and done >= total:
            self._line.clear()
            self._stage = ""
            if seconds >= QUIET_S:
                self.output.line(f"{title}: {', '.join(amounts)} in {duration(seconds)}")
        elif seconds >= QUIET_S and (self.live or now - self._last_shown >= PLAIN_S):
            self._last_shown = now
            rate = (done - self._stage_first) / seconds
            left = [f"left {duration((total - done) / rate)}"] if total and rate else []
            figures = [*amounts, *([f"{unit(rate)}/s"] if rate else []), *left]
            if not self.live:
                self.output.line("  ".join([title, *figures]))
                return
            self._line.show(BarLine(title=title, share=done / total if total else 0.0, figures=figures))

    @on_event.register
    def _on_training(self, event: TrainingStarted) -> None:
        self.num_steps = event.num_steps
        if self.live:
            self._show_training(event.done, ["first step ..."])

    @on_event.register
    def _on_training_end(self, event: TrainingEnded) -> None:
        self._bar = None  # do not restore it while the result is saved
        self._line.clear()

    @on_event.register
    def _on_evaluation_start(self, event: EvaluationStarted) -> None:
        self._stage = f"evaluating step {event.step}"
        self._last_shown = time.monotonic()
        if self.live:
            self._line.show(BarLine(title=self._stage, share=0.0))
        elif self.verbose:
            self.output.line(f"{self._stage} ...", style=QUIET)

    @on_event.register
    def _on_evaluating(self, event: Evaluating) -> None:
        now = time.monotonic()
        amount = f"{event.done}/{event.total} {event.what}"
        if event.stage:
            self.show_stage(event.stage, event.done, event.total, [amount], unit="{:.1f}".format)
        elif self.live:
            share = event.done / max(1, event.total)
            self._line.show(BarLine(title=self._stage, share=share, figures=[amount]))
        elif now - self._last_shown >= PLAIN_S:
            self._last_shown = now
            self.output.line(f"  {self._stage}: {amount}", style=QUIET)

    @on_event.register
    def _on_evaluation(self, event: Evaluated) -> None:
        if self._bar is not None:
            self._line.show(self._bar)
        else:
            self._line.clear()
        metrics: dict[str, float] = terminal_metrics(event.metrics)
        parts, style = [], STRONG
        for name, value in metrics.items():
            before = self._last_metrics.get(name)
            was = f" (was {figure(before, digits=4)})" if before is not None else ""
            parts.append(f"{name} {figure(value, digits=4)}{was}")
            if name == "loss" and before is not None:
                style = GOOD if value <= before else WARNING
        self._last_metrics = metrics
        self.output.line(
            f"eval     step {event.step}: {'  '.join(parts)}  in {duration(event.seconds)}", style=style
        )
        for sample in event.samples[:3]:
            # Equality with the reference is informative only if it is the metric.
            mark = _mark(sample) if "exact_match" in metrics else ""
            self.output.line(
                f"  > {_short(sample['prompt'])}\n  {mark}{_short(sample['answer']) or '(empty)'}",
                style=QUIET,
            )

    @on_event.register(Stopped)
    @on_event.register(ResultSaved)
    def _on_end(self, event: Event) -> None:
        self.close()
        self._print_event(event)


@dataclass(frozen=True, kw_only=True)
class BarLine:
    """A title, a bar and figures, the most important first; figures that do not fit are omitted."""

    title: str
    share: float
    """The finished fraction of the work."""
    figures: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width - 1  # terminals differ in wrapping after the last column
        title, most = printable(self.title), max(1, width - MIN_BAR - 1)
        title = title if len(title) <= most else title[-most:]  # the end of a path is the informative part
        figures = [f"  {printable(word)}" for word in self.figures]
        while figures and cell_len(title + "".join(figures)) + MIN_BAR + 1 > width:
            figures.pop()
        length = max(0, min(MAX_BAR, width - cell_len(title + "".join(figures)) - 1))
        full = round(length * min(1.0, max(0.0, self.share)))
        done, left = ("#", "-") if options.ascii_only else ("━", "─")  # distinguishable without colors
        bar = (done * full, "green" if self.share >= 1 else "cyan"), (left * (length - full), "bright_black")
        yield Text.assemble(title, " ", *bar, *figures, no_wrap=True, overflow="crop")


class ProgressLine(Protocol):
    """A place that shows the progress, rewritten as work proceeds."""

    def show(self, line: BarLine) -> None: ...

    def clear(self) -> None: ...


class LiveLine:
    """The last line of a terminal, rewritten as work proceeds; other lines appear above it."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None

    def show(self, line: BarLine) -> None:
        if self._live is not None:
            self._live.update(line)
            return
        self._live = Live(
            line,
            console=self.console,
            transient=True,
            # Print other text above the line, unless it goes to a file.
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
            redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),
        )
        self._live.start(refresh=True)

    def clear(self) -> None:
        """Remove the line."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _part(done: int, total: int | None) -> str:
    return f"{size(done)} of {size(total)}" if total and done < total else size(done)


def _mark(sample: Any) -> str:
    if not sample["reference"]:
        return ""
    return "= " if sample["answer"] == sample["reference"] else "x "


def _short(text: str, limit: int = 110) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3].rsplit(" ", 1)[0] + " ..."


def _with_samples(metrics: StepMetrics, figures: Sequence[str]) -> list[str]:
    """Return the figures of a line; for a recipe that counts examples, with `Loss: 1.2345` and `'samples_per_sec': 67.89`
    for scripts of the original interface."""
    examples, loss = dict(metrics).get("examples"), metrics["loss"]
    if not isinstance(examples, int) or loss is None:
        return list(figures)
    rate = examples / max(1e-9, metrics["step_s"])
    return [f"Loss: {loss:.4f}", *figures[1:], f"'samples_per_sec': {rate:.2f}"]
