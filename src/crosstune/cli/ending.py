"""Print how a training ended, and the commands that come next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from crosstune.cli.output import GOOD, STRONG, WARNING, Output
from crosstune.cli.units import count, duration, figure, size
from crosstune.core.user_paths import shown_path
from crosstune.report.next_steps import use_result
from crosstune.runs.next_commands import read_options


def print_ending(summary: Mapping[str, Any], folder: Path, report: Path | None, output: Output) -> None:
    for text, style in ending_lines(summary, folder, report):
        output.line(text, style=style)


def ending_lines(
    summary: Mapping[str, Any], folder: Path, report: Path | None
) -> Iterator[tuple[str, str | None]]:
    """Yield the lines of a run's end with their styles."""
    finished = summary["status"] == "finished"
    if summary.get("already_finished"):
        yield f"already finished: {folder} (raise --num_epochs or --max_steps to continue)", WARNING
    rate = f"{figure(summary['tokens_per_s'])} tok/s" if summary["tokens_per_s"] else "no step"
    yield (
        f"{summary['status']:<8} {summary['steps']:,} steps, {count(summary['tokens'])} tokens in "
        f"{duration(summary['seconds'])} ({rate}, peak memory {size(summary['peak_memory_bytes'])})",
        GOOD if finished else WARNING,
    )
    for text in _evaluation_lines(summary):
        yield text, STRONG
    yield f"run      {shown_path(folder)}", None
    if summary["result"]:
        yield f"result   {shown_path(summary['result'])}{_which_weights(summary)}", None
    if report is not None:
        yield f"report   {shown_path(report)}", None
    if not finished:
        yield _how_to_continue(summary, folder), STRONG
    elif summary["result"]:
        for step in use_result(summary, folder, options=read_options(folder)):
            yield f"{step.label:<8} {step.command}", None


def _evaluation_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each metric: before training, at the best step, and at the last."""
    best, last = summary.get("best"), summary.get("last")
    for name, after in summary["eval_after"].items():
        before = summary["eval_before"].get(name)
        parts = [f"{figure(before)} before training"] if before is not None else []
        if best is not None and last is not None and best["step"] != last["step"]:
            parts.append(f"{figure(best['metrics'][name])} at step {best['step']}, the best")
            parts.append(f"{figure(after)} at step {last['step']}, the last")
        else:
            parts.append(f"{figure(after)} after")
        yield f"eval     {name} {', '.join(parts)}"


def _which_weights(summary: Mapping[str, Any]) -> str:
    """Say which weights the result has, where they are not the last ones."""
    step = summary.get("result_step")
    return f" (step {step}, the best evaluation)" if step not in (None, summary["steps"]) else ""


def _how_to_continue(summary: Mapping[str, Any], folder: Path) -> str:
    if summary["checkpoint"]:
        return f"continue crosstune train --resume {shlex.quote(shown_path(folder))}"
    return "continue no checkpoint was saved: run the same command with another --name or with --overwrite"
