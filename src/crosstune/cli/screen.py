"""Show the progress of a run: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from functools import singledispatchmethod
from typing import TextIO

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from crosstune.cli.console import EscapingConsole
from crosstune.cli.units import count, duration, size
from crosstune.core.events import (
    Adjusted,
    CheckpointFailed,
    CheckpointSaved,
    CheckpointSetAside,
    Evaluated,
    Evaluating,
    EvaluationStarted,
    Event,
    Failed,
    Interrupted,
    Loaded,
    Loading,
    LossCompared,
    LossMeasured,
    ModelProgress,
    Moved,
    NonFinite,
    ResultSaved,
    Resumed,
    RunMovedAside,
    Started,
    StepMetrics,
    Stopped,
    Tokenizing,
    TrainingStarted,
    Warned,
)
from crosstune.core.measured import Comparison

PLAIN_SECONDS = 5.0
NOT_SHOWN: tuple[type[Event], ...] = (Failed, Interrupted)
"""Events that print nothing here: the command prints the error that ended the run."""


class Screen:
    """Print events and steps. On a terminal, a bar shows step, loss, tokens per second, time left and memory."""

    def __init__(
        self,
        *,
        live: bool,
        every: int = 1,
        verbose: bool = False,
        lines: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        """With `lines`, print a line per step above the live bar too."""
        self.console = EscapingConsole(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        self.live = live and self.console.is_terminal
        self.every = every
        self.verbose = verbose
        self.lines = lines or not self.live
        self.num_steps = 0
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._seconds = 0.0
        self._steps = 0
        self._tokens = 0
        self._last_shown = 0.0
        self._last_stage = ""
        self._stage_started = 0.0
        self._stage_finished = False
        self._last_metrics: dict[str, float] = {}

    def on_step(self, metrics: StepMetrics) -> None:
        self._steps += 1
        if self._steps > 1:  # the first step includes warm-up
            self._seconds += metrics["step_s"]
            self._tokens += metrics["tokens"]
        rate = self._tokens / self._seconds if self._seconds else metrics["tokens_per_s"]
        per_step = self._seconds / (self._steps - 1) if self._steps > 1 else metrics["step_s"]
        left = duration(per_step * (self.num_steps - metrics["step"]))
        loss = "skipped" if metrics["loss"] is None else f"{metrics['loss']:.4f}"
        words = (
            f"loss {loss}  lr {metrics['lr']:.2e}  {rate:,.0f} tok/s  "
            f"left {left}  mem {size(metrics['memory_bytes'])}"
        )
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=metrics["step"], words=words)
        if metrics["step"] % self.every == 0 and self.lines:
            self._print(f"step {metrics['step']}/{self.num_steps}  {words}")

    @singledispatchmethod
    def on_event(self, event: Event) -> None:
        """Print an event with the handler registered for its class; those in `NOT_SHOWN` have none."""

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, text: str, *, style: str | None = None) -> None:
        target = self._bar.console if self._bar is not None else self.console
        target.print(escape(text), style=style)

    @on_event.register
    def _on_adjustment(self, event: Adjusted) -> None:
        style = {"change": "yellow", "warning": "yellow"}.get(event.sort, "dim")
        label = {"change": "changed ", "warning": "warning "}.get(event.sort, "chosen  ")
        self._print(f"{label} {event.sentence}", style=style)

    @on_event.register
    def _on_moved_aside(self, event: RunMovedAside) -> None:
        self._print(f"moved    the old run is now {event.path}", style="dim")

    @on_event.register
    def _on_model_progress(self, event: ModelProgress) -> None:
        now = time.monotonic()
        total = event.total
        finished = total is not None and event.done >= total
        stage_changed = event.stage != self._last_stage
        if finished and not stage_changed and self._stage_finished:
            return
        self._stage_finished = finished
        if not (finished or stage_changed or now - self._last_shown >= (0.2 if self.live else PLAIN_SECONDS)):
            return
        if stage_changed:
            self._stage_started = now
        self._last_shown, self._last_stage = now, event.stage
        rate = event.done / (now - self._stage_started) if now > self._stage_started else 0.0
        share = f"{size(event.done)} of {size(total)}" if total else size(event.done)
        ending = f"  {size(rate)}/s" if rate else ""
        text = f"model    {event.model}: {event.stage} {share}{ending}"
        if self.live:
            self.console.print(escape(text).ljust(90), end="\n" if finished else "\r")
        else:
            self._print(text)

    @on_event.register
    def _on_tokenizing(self, event: Tokenizing) -> None:
        now = time.monotonic()
        stage = f"tokenizing {event.source}"
        done, total = event.done_bytes, event.total_bytes
        if stage != self._last_stage:
            self._last_stage, self._stage_started, self._last_shown = stage, now, now
        seconds = now - self._stage_started
        finished = done >= total
        # Print nothing for a data set that is read within a second.
        if seconds < 1.0 or not (finished or now - self._last_shown >= (0.2 if self.live else PLAIN_SECONDS)):
            return
        self._last_shown = now
        rate = done / seconds
        left = (
            f"left {duration((total - done) / rate)}" if rate and not finished else f"in {duration(seconds)}"
        )
        text = (
            f"tokens   {event.source}: {event.examples:,} examples, {size(done)} of {size(total)}  "
            f"{size(rate)}/s  {left}"
        )
        if self.live:
            self.console.print(escape(text).ljust(90), end="\n" if finished else "\r")
        else:
            self._print(text)

    @on_event.register
    def _on_start(self, event: Started) -> None:
        train = event.data.get("train", {})
        parts = [f"{train.get('examples', 0):,} examples"]
        if "tokens" in train:  # a recipe's examples need not consist of tokens
            parts.append(f"{count(train['tokens'])} tokens")
            parts.append(f"{count(train.get('supervised_tokens', 0))} supervised")
            parts.append(f"longest {train.get('longest', 0)}")
        self._print(f"data     {event.data.get('dataset')}: {', '.join(parts)}")
        for sentence in event.data.get("warnings", ()):
            self._print(f"warning  {sentence}", style="yellow")
        self.num_steps = event.num_steps
        self._print(f"run      {event.folder}")

    @on_event.register
    def _on_warning(self, event: Warned) -> None:
        self._print(f"warning  {event.message}", style="yellow")

    @on_event.register
    def _on_loading(self, event: Loading) -> None:
        self._print(f"loading  {event.model}")

    @on_event.register
    def _on_loaded(self, event: Loaded) -> None:
        trained, everything = event.trained_parameters, event.parameters
        share = 100 * trained / everything
        self._print(f"loaded   {count(everything)} parameters, {count(trained)} trained ({share:.2f} %)")

    @on_event.register
    def _on_evaluation_start(self, event: EvaluationStarted) -> None:
        self._last_shown = time.monotonic()
        if self.verbose or self.live:
            self._print(f"evaluating at step {event.step} ...", style="dim")

    @on_event.register
    def _on_evaluating(self, event: Evaluating) -> None:
        now = time.monotonic()
        if now - self._last_shown >= PLAIN_SECONDS:
            self._last_shown = now
            self._print(f"  answered {event.done} of {event.total} held-out prompts", style="dim")

    @on_event.register
    def _on_evaluation(self, event: Evaluated) -> None:
        metrics: dict[str, float] = dict(event.metrics)
        parts = []
        for name, value in metrics.items():
            before = self._last_metrics.get(name)
            parts.append(f"{name} {value:.4f}" + (f" (was {before:.4f})" if before is not None else ""))
        self._last_metrics = metrics
        self._print(
            f"eval     step {event.step}: {'  '.join(parts)}  in {duration(event.seconds)}", style="bold"
        )
        for sample in event.samples[:3]:
            mark = (
                "" if not sample["reference"] else ("= " if sample["answer"] == sample["reference"] else "x ")
            )
            self._print(f"  > {_short(sample['prompt'])}\n  {mark}{_short(sample['answer'])}", style="dim")

    @on_event.register
    def _on_training(self, event: TrainingStarted) -> None:
        self.num_steps = event.num_steps
        if self.live:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[words]}"),
                console=self.console,
                transient=False,
            )
            self._task = self._bar.add_task(
                "train", total=self.num_steps, completed=event.done, words="first step ..."
            )
            self._bar.start()

    @on_event.register
    def _on_resumed(self, event: Resumed) -> None:
        self._print(f"resumed  at step {event.step} from {event.checkpoint}", style="bold")
        for sentence in dict.fromkeys((*event.adapted, *event.allowed_differences, *event.changed_options)):
            self._print(f"changed  {sentence}", style="yellow")

    @on_event.register
    def _on_measured(self, event: LossMeasured) -> None:
        measured = event.measured
        self._print(f"measured loss {measured.loss:.6f} on {measured.backend}: {measured.terms()}")

    @on_event.register
    def _on_compared(self, event: LossCompared) -> None:
        self._print_comparison(event.comparison)

    @on_event.register
    def _on_moved(self, event: Moved) -> None:
        self._print_comparison(event.comparison)

    def _print_comparison(self, compared: Comparison) -> None:
        there, here = compared.there, compared.here
        self._print(
            f"compared the same batches: {there.loss:.6f} on {there.backend} ({there.terms()}), "
            f"{here.loss:.6f} on {here.backend} ({here.terms()}): relative difference {compared.difference:.2e}, "
            f"at most {compared.bound:g} allowed",
            style="bold",
        )

    @on_event.register
    def _on_set_aside(self, event: CheckpointSetAside) -> None:
        self._print(f"aside    a checkpoint after step {event.step} is now {event.path}", style="dim")

    @on_event.register
    def _on_checkpoint(self, event: CheckpointSaved) -> None:
        self._print(
            f"saved    checkpoint of step {event.step}: {size(event.bytes)} in {event.seconds:.1f} s, "
            f"training waited {event.blocked_s * 1000:.0f} ms",
            style="dim",
        )

    @on_event.register
    def _on_checkpoint_failed(self, event: CheckpointFailed) -> None:
        self._print(f"warning  {event.error}", style="bold red")

    @on_event.register
    def _on_nonfinite(self, event: NonFinite) -> None:
        ending = f"step skipped ({event.allowed} allowed)" if event.skipped else "stopping"
        self._print(f"warning  step {event.step}: {event.error} {event.blame}; {ending}", style="bold red")

    @on_event.register
    def _on_stopped(self, event: Stopped) -> None:
        self.close()
        self._print(
            f"stopped  by {event.reason} after step {event.step} of {event.num_steps}", style="yellow"
        )

    @on_event.register
    def _on_saved(self, event: ResultSaved) -> None:
        self.close()
        self._print(f"saved    {event.path}")
        for name, agreement in (event.against_trained or {}).items():
            self._print(
                f"warning  the new blocks are saved with the {name} weights; the logits differ by "
                f"{agreement['relative']:.2g} (relative) from those of the trained model; "
                "crosstune export --to hf --into dequantized writes the trained model itself",
                style="yellow",
            )


def _short(text: str, limit: int = 110) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
