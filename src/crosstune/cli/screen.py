"""A run on the terminal: a live line where there is one, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from crosstune.cli.units import count, duration, size

PLAIN_SECONDS = 5.0


class Screen:
    """Prints events and steps. On a terminal a bar shows the step, loss, rate, time left and memory."""

    def __init__(
        self,
        *,
        live: bool,
        every: int = 1,
        verbose: bool = False,
        lines: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        """`lines`: print a line for steps above the live bar too."""
        self.console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
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

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        self._steps += 1
        if self._steps > 1:  # the first step pays for warming up
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

    def on_event(self, kind: str, data: Mapping[str, Any]) -> None:
        handler = getattr(self, f"_on_{kind}", None)
        if handler is not None:
            handler(data)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, text: str, *, style: str | None = None) -> None:
        target = self._bar.console if self._bar is not None else self.console
        target.print(escape(text), style=style)

    def _on_adjustment(self, data: Mapping[str, Any]) -> None:
        style = {"change": "yellow", "warning": "yellow"}.get(data["sort"], "dim")
        label = {"change": "changed ", "warning": "warning "}.get(data["sort"], "chosen  ")
        self._print(f"{label} {data['sentence']}", style=style)

    def _on_moved_aside(self, data: Mapping[str, Any]) -> None:
        self._print(f"moved    the old run is now {data['path']}", style="dim")

    def _on_model_progress(self, data: Mapping[str, Any]) -> None:
        now = time.monotonic()
        total = data["total"]
        finished = total is not None and data["done"] >= total
        stage_changed = data["stage"] != self._last_stage
        if finished and not stage_changed and self._stage_finished:
            return
        self._stage_finished = finished
        if not (finished or stage_changed or now - self._last_shown >= (0.2 if self.live else PLAIN_SECONDS)):
            return
        if stage_changed:
            self._stage_started = now
        self._last_shown, self._last_stage = now, data["stage"]
        rate = data["done"] / (now - self._stage_started) if now > self._stage_started else 0.0
        share = f"{size(data['done'])} of {size(total)}" if total else size(data["done"])
        ending = f"  {size(rate)}/s" if rate else ""
        text = f"model    {data['model']}: {data['stage']} {share}{ending}"
        if self.live:
            self.console.print(escape(text).ljust(90), end="\n" if finished else "\r")
        else:
            self._print(text)

    def _on_tokenizing(self, data: Mapping[str, Any]) -> None:
        now = time.monotonic()
        stage = f"tokenizing {data['source']}"
        done, total = data["done_bytes"], data["total_bytes"]
        if stage != self._last_stage:
            self._last_stage, self._stage_started, self._last_shown = stage, now, now
        seconds = now - self._stage_started
        finished = done >= total
        # A data set that is read in a moment needs no line.
        if seconds < 1.0 or not (finished or now - self._last_shown >= (0.2 if self.live else PLAIN_SECONDS)):
            return
        self._last_shown = now
        rate = done / seconds
        left = (
            f"left {duration((total - done) / rate)}" if rate and not finished else f"in {duration(seconds)}"
        )
        text = (
            f"tokens   {data['source']}: {data['examples']:,} examples, {size(done)} of {size(total)}  "
            f"{size(rate)}/s  {left}"
        )
        if self.live:
            self.console.print(escape(text).ljust(90), end="\n" if finished else "\r")
        else:
            self._print(text)

    def _on_start(self, data: Mapping[str, Any]) -> None:
        train = data["data"].get("train", {})
        parts = [f"{train.get('examples', 0):,} examples", f"{count(train.get('tokens', 0))} tokens"]
        parts.append(f"{count(train.get('supervised_tokens', 0))} supervised")
        parts.append(f"longest {train.get('longest', 0)}")
        self._print(f"data     {data['data'].get('dataset')}: {', '.join(parts)}")
        for sentence in data["data"].get("warnings", ()):
            self._print(f"warning  {sentence}", style="yellow")
        self.num_steps = data["num_steps"]
        self._print(f"run      {data['folder']}")

    def _on_warning(self, data: Mapping[str, Any]) -> None:
        self._print(f"warning  {data['message']}", style="yellow")

    def _on_loading(self, data: Mapping[str, Any]) -> None:
        self._print(f"loading  {data['model']}")

    def _on_loaded(self, data: Mapping[str, Any]) -> None:
        trained, everything = data["trained_parameters"], data["parameters"]
        share = 100 * trained / everything
        self._print(f"loaded   {count(everything)} parameters, {count(trained)} trained ({share:.2f} %)")

    def _on_evaluation_start(self, data: Mapping[str, Any]) -> None:
        self._last_shown = time.monotonic()
        if self.verbose or self.live:
            self._print(f"evaluating at step {data['step']} ...", style="dim")

    def _on_evaluating(self, data: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if now - self._last_shown >= PLAIN_SECONDS:
            self._last_shown = now
            self._print(f"  answered {data['done']} of {data['total']} held-out prompts", style="dim")

    def _on_evaluation(self, data: Mapping[str, Any]) -> None:
        metrics: dict[str, float] = dict(data["metrics"])
        parts = []
        for name, value in metrics.items():
            before = self._last_metrics.get(name)
            parts.append(f"{name} {value:.4f}" + (f" (was {before:.4f})" if before is not None else ""))
        self._last_metrics = metrics
        self._print(
            f"eval     step {data['step']}: {'  '.join(parts)}  in {duration(data['seconds'])}", style="bold"
        )
        for sample in data["samples"][:3]:
            mark = (
                "" if not sample["reference"] else ("= " if sample["answer"] == sample["reference"] else "x ")
            )
            self._print(f"  > {_short(sample['prompt'])}\n  {mark}{_short(sample['answer'])}", style="dim")

    def _on_training(self, data: Mapping[str, Any]) -> None:
        self.num_steps = data["num_steps"]
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
                "train", total=self.num_steps, completed=data["done"], words="first step ..."
            )
            self._bar.start()

    def _on_resumed(self, data: Mapping[str, Any]) -> None:
        self._print(f"resumed  step {data['step']} of {data['checkpoint']}", style="bold")
        for sentence in dict.fromkeys(
            (*data["adapted"], *data["allowed_differences"], *data["changed_options"])
        ):
            self._print(f"changed  {sentence}", style="yellow")

    def _on_measured(self, data: Mapping[str, Any]) -> None:
        self._print(f"measured loss {data['loss']:.6f} on {data['backend']}: {_terms(data)}")

    def _on_compared(self, data: Mapping[str, Any]) -> None:
        there, here = data["from"], data["to"]
        self._print(
            f"compared the same batches: {there['loss']:.6f} on {there['backend']} ({_terms(there)}), "
            f"{here['loss']:.6f} on {here['backend']} ({_terms(here)}): {data['difference']:.2e} apart, "
            f"at most {data['bound']:g}",
            style="bold",
        )

    _on_moved = _on_compared

    def _on_set_aside(self, data: Mapping[str, Any]) -> None:
        self._print(f"aside    a checkpoint after step {data['step']} is now {data['path']}", style="dim")

    def _on_checkpoint(self, data: Mapping[str, Any]) -> None:
        self._print(
            f"kept     checkpoint of step {data['step']}: {size(data['bytes'])} in {data['seconds']:.1f} s, "
            f"training waited {data['blocked_s'] * 1000:.0f} ms",
            style="dim",
        )

    def _on_checkpoint_failed(self, data: Mapping[str, Any]) -> None:
        self._print(f"warning  {data['error']}", style="bold red")

    def _on_nonfinite(self, data: Mapping[str, Any]) -> None:
        ending = f"step left out ({data['allowed']} allowed)" if data["skipped"] else "stopping"
        self._print(
            f"warning  step {data['step']}: {data['error']} {data['blame']}; {ending}", style="bold red"
        )

    def _on_stopped(self, data: Mapping[str, Any]) -> None:
        self.close()
        self._print(
            f"stopped  by {data['reason']} after step {data['step']} of {data['num_steps']}", style="yellow"
        )

    def _on_saved(self, data: Mapping[str, Any]) -> None:
        self.close()
        self._print(f"saved    {data['path']}")
        for name, agreement in data.get("against_trained", {}).items():
            self._print(
                f"warning  the new blocks are saved over the {name} weights, {agreement['relative']:.2g} (relative) from "
                "the model that was trained; crosstune export --to hf --into dequantized writes that one",
                style="yellow",
            )


def _terms(side: Mapping[str, Any]) -> str:
    return f"{side['precision']}, {side['quantization'] or 'not quantized'}"


def _short(text: str, limit: int = 110) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
