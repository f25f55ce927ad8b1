"""Format a run's events and outcome as lines; the screen handles events that change the live line."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from crosstune.cli.terminal.figures import count, duration, figure, size
from crosstune.cli.terminal.output import ERROR, GOOD, QUIET, STRONG, WARNING
from crosstune.config.recipe_spec import read_options
from crosstune.core.events import (
    Adjusted,
    CheckpointFailed,
    CheckpointSaved,
    CheckpointSetAside,
    Event,
    Loaded,
    Loading,
    LossCompared,
    LossMeasured,
    Moved,
    NonFinite,
    Profiled,
    Recovered,
    ResultSaved,
    Resumed,
    RewardPrinted,
    RunMovedAside,
    Started,
    Stopped,
    Warned,
)
from crosstune.files.paths import shown_path
from crosstune.report.formatting import show_examples, terminal_metrics
from crosstune.report.next_steps import use_result
from crosstune.tracking.tracker import TrackingFailed, TrackingStarted, TrackingWaits

Lines = Iterable[tuple[str, str | None]]
"""Lines with their styles."""


def event_lines(event: Event) -> Lines:
    """Return the lines for an event, possibly none."""
    make = LINES.get(type(event))
    return make(event) if make is not None else ()


def _adjusted(event: Adjusted) -> Lines:
    label = {"change": "changed", "warning": "warning", "name": "read as"}.get(
        event.adjustment_kind, "chosen"
    )
    yield f"{label:<8} {event.sentence}", WARNING if label in ("changed", "warning") else QUIET


def _started(event: Started) -> Lines:
    train = event.data.get("train", {})
    parts = [show_examples(event.data) or "0 examples"]
    if "tokens" in train:  # the examples of some recipes are not tokens
        parts.append(f"{count(train['tokens'])} tokens")
        if supervised := train.get("supervised_tokens"):  # prompts have none
            parts.append(f"{count(supervised)} supervised")
        parts.append(f"longest {train.get('longest', 0)}")
    yield f"data     {event.data.get('dataset')}: {', '.join(parts)}", None
    for sentence in event.data.get("notes", ()):
        yield f"note     {sentence}", None
    for sentence in event.data.get("warnings", ()):
        yield f"warning  {sentence}", WARNING
    if event.processes:
        yield f"ranks    {event.processes}", None
    yield f"run      {event.folder}", None


def _loaded(event: Loaded) -> Lines:
    trained, total = event.trained_parameters, event.parameters
    yield (
        f"loaded   {count(total)} parameters, {count(trained)} trained ({100 * trained / total:.3g} %)"
        + (f"; optimizer {event.optimizer}" if event.optimizer else ""),
        None,
    )


def _reward_printed(event: RewardPrinted) -> Lines:
    for line in event.text.splitlines():
        yield f"printed  {event.reward}: {line}", QUIET


def _resumed(event: Resumed) -> Lines:
    yield f"resumed  at step {event.step} from {event.checkpoint}", STRONG
    for sentence in dict.fromkeys((*event.adapted, *event.allowed_differences, *event.changed_options)):
        yield f"changed  {sentence}", WARNING


def _compared(event: LossCompared | Moved) -> Lines:
    found = event.comparison
    there, here = found.there, found.here
    yield (
        f"compared the same batches: {there.loss:.6f} on {there.backend} ({there.terms()}), "
        f"{here.loss:.6f} on {here.backend} ({here.terms()}): relative difference {found.difference:.2e}, "
        f"at most {found.bound:g} allowed",
        GOOD if found.difference <= found.bound else ERROR,
    )


def _nonfinite(event: NonFinite) -> Lines:
    ending = f"step skipped ({event.allowed} allowed)" if event.skipped else "stopping"
    yield f"warning  step {event.step}: {event.error} {event.blame}; {ending}", ERROR


def _profiled(event: Profiled) -> Lines:
    from crosstune.loop.profile import profile_lines

    yield from ((line, None) for line in profile_lines(event.result))
    yield f"profile  {event.path}", STRONG


def _tracking(event: TrackingStarted) -> Lines:
    yield f"tracking {event.tracker}: {event.where}", None
    if event.view:
        yield f"         {event.view}", QUIET


def _tracking_failed(event: TrackingFailed) -> Lines:
    yield f"warning  {event.tracker}: {event.error}", WARNING
    yield "         the run continues without it; metrics.jsonl has all values", QUIET


def _recovered(event: Recovered) -> Lines:
    changed = ", ".join(f"{option} {value}" for option, value in event.changed.items())
    rows = " (the same rows per step)" if "batch_size" in event.changed else ""
    yield (
        f"warning  step {event.step}: not enough memory for {event.doing}; repeating it with {changed}{rows}; "
        f"next time use {event.next_time}",
        WARNING,
    )


def _saved(event: ResultSaved) -> Lines:
    yield f"saved    {event.path}", None
    for name, agreement in (event.against_trained or {}).items():
        yield (
            f"warning  the new blocks are saved with the {name} weights; the logits differ from the trained model's by "
            f"{agreement['relative']:.2g} (relative); crosstune export --to hf --into dequantized writes the trained model",
            WARNING,
        )


def _line(text: Callable[[Any], str], style: str | None = None) -> Callable[[Any], Lines]:
    """Return a function that formats an event as one line."""
    return lambda event: [(text(event), style)]


LINES: Mapping[type[Event], Callable[[Any], Lines]] = {
    Adjusted: _adjusted,
    RunMovedAside: _line(lambda e: f"moved    the old run is now {e.path}", QUIET),
    Started: _started,
    RewardPrinted: _reward_printed,
    Warned: _line(lambda e: f"warning  {e.message}", WARNING),
    Loading: _line(lambda e: f"loading  {e.model}"),
    Loaded: _loaded,
    Resumed: _resumed,
    LossMeasured: _line(
        lambda e: f"measured loss {e.measured.loss:.6f} on {e.measured.backend}: {e.measured.terms()}"
    ),
    LossCompared: _compared,
    Moved: _compared,
    CheckpointSetAside: _line(lambda e: f"renamed  checkpoint newer than step {e.step} to {e.path}", QUIET),
    CheckpointSaved: _line(
        lambda e: (
            f"saved    checkpoint of step {e.step}: {size(e.bytes)} in {e.seconds:.1f} s, "
            f"training waited {e.blocked_s * 1000:.0f} ms"
        ),
        QUIET,
    ),
    CheckpointFailed: _line(lambda e: f"warning  {e.error}", ERROR),
    NonFinite: _nonfinite,
    Profiled: _profiled,
    TrackingStarted: _tracking,
    TrackingFailed: _tracking_failed,
    TrackingWaits: _line(
        lambda e: (
            f"tracking waiting for {', '.join(e.trackers)}, at most {e.seconds:.0f} s (Ctrl-C stops waiting)"
        ),
        QUIET,
    ),
    Recovered: _recovered,
    Stopped: _line(lambda e: f"stopped  by {e.reason} after step {e.step} of {e.num_steps}", WARNING),
    ResultSaved: _saved,
}


def ending_lines(
    summary: Mapping[str, Any], folder: Path, report: Path | None
) -> Iterator[tuple[str, str | None]]:
    """Yield the lines about the outcome of a run, with their styles."""
    finished = summary["status"] == "finished"
    if summary.get("already_finished"):
        yield f"already finished: {folder} (raise --num_epochs or --max_steps to continue)", WARNING
    rate = f"{figure(summary['tokens_per_s'])} tok/s" if summary["tokens_per_s"] else "no step"
    yield (
        f"{summary['status']:<8} {summary['steps']:,} step{'s' * (summary['steps'] != 1)}, {count(summary['tokens'])} tokens in "
        f"{duration(summary['seconds'])} ({rate}, peak memory {size(summary['peak_memory_bytes'])})",
        GOOD if finished else WARNING,
    )
    for text in _evaluation_lines(summary):
        yield text, STRONG
    for sentence in summary.get("verdicts", {}).values():
        yield f"verdict  {sentence}", WARNING
    yield f"run      {shown_path(folder)}", None
    if summary["result"]:
        step = summary.get("result_step")
        best = f" (step {step}, the best evaluation)" if step not in (None, summary["steps"]) else ""
        yield f"result   {shown_path(summary['result'])}{best}", None
    if report is not None:
        yield f"report   {shown_path(report)}", None
    if not finished:
        how = "no checkpoint was saved: repeat the command with a different --name or with --overwrite"
        if summary["checkpoint"]:
            how = f"crosstune train --resume {shlex.quote(shown_path(folder))}"
        yield f"continue {how}", STRONG
    elif summary["result"]:
        for step in use_result(summary, folder, options=read_options(folder)):
            yield f"{step.label:<8} {step.command}", None


def _evaluation_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line per metric: before training, at the best step, at the last step."""
    best, last = summary.get("best"), summary.get("last")
    first = terminal_metrics(summary["eval_before"])
    for name, after in terminal_metrics(summary["eval_after"]).items():
        before = first.get(name)
        parts = [f"{figure(before)} before training"] if before is not None else []
        if best is not None and last is not None and best["step"] != last["step"]:
            parts.append(f"{figure(best['metrics'][name])} at step {best['step']}, the best")
            parts.append(f"{figure(after)} at step {last['step']}, the last")
        else:
            parts.append(f"{figure(after)} after")
        if name in (intervals := summary.get("eval_intervals", {})):
            low, high = intervals[name]
            parts[-1] += f" (95 % interval {low:.2f} to {high:.2f})"
        yield f"eval     {name} {', '.join(parts)}"
