"""List the runs of a folder, reading little of each: there may be thousands."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.core.events import Evaluated, Failed, Stopped
from crosstune.files.run_record import RUN_FILES
from crosstune.loop.progress import best_step
from crosstune.report.files import is_running, last_rows, mapping, number, read_mapping

_STEPS_BYTES = 1 << 16
_EVENTS_BYTES = 1 << 20
"""Bytes read from the end of metrics.jsonl and events.jsonl of a run without a summary."""
RECORDED = ("finished", "stopped", "failed")
"""Statuses in summary.json."""


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """A run in the list."""

    name: str
    folder: str
    status: str
    recipe: str
    model: str
    method: str
    steps: int
    num_steps: int | None
    loss: float | None
    best_eval: float | None
    best_step: int | None
    tokens_per_s: float | None
    peak_memory_bytes: int | None
    changed: float
    """Time of the last write, in seconds since 1970."""
    age_s: float
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run_folders(parent: Path) -> list[tuple[Path, float]]:
    """Return the runs in a folder and the times of their last writes, the newest first."""
    try:
        with os.scandir(parent) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(
            f"No runs folder at {parent}.",
            why=f"{error.strerror}.",
            do="train first, or specify the folder with --output_dir",
        ) from error
    found = [(parent / name, _last_write(parent / name)) for name in names]
    known = [(path, changed) for path, changed in found if changed is not None]
    return sorted(known, key=lambda pair: (-pair[1], pair[0].name))


def _last_write(folder: Path) -> float | None:
    """Return the time of the last write to a run's files; None if there are none."""
    times = list[float]()
    for name in RUN_FILES:
        try:
            times.append((folder / name).stat().st_mtime)
        except (OSError, ValueError):
            continue
    return max(times, default=None)


def read_listed(folder: Path, *, changed: float, now: float | None = None) -> ListedRun:
    """Read a run for the list. `problems` lists damaged files; their values are missing."""
    problems = list[str]()
    plan = read_mapping(folder / "plan.json", problems)
    summary = read_mapping(folder / "summary.json", problems)
    running = is_running(folder)
    steps = last_rows(folder / "metrics.jsonl", limit=_STEPS_BYTES) if running or not summary else []
    last = steps[-1] if steps else {}
    events = last_rows(folder / "events.jsonl", limit=_EVENTS_BYTES) if running or not summary else []
    evaluations = mapping(summary.get("evaluations")) if not running else {}
    best, lowest = _best(evaluations, events)
    options = mapping(plan.get("options")) or mapping(plan.get("asked"))
    done = number(last.get("step")) if last else number(summary.get("steps"))
    return ListedRun(
        name=folder.name,
        folder=str(folder),
        status=status_of(summary, events, running=running, problems=problems),
        recipe=str(options.get("recipe") or "-"),
        model=str(mapping(plan.get("model")).get("name") or options.get("model_name") or "-"),
        method=_method(plan),
        steps=int(done or 0),
        num_steps=_whole(plan.get("num_steps")),
        loss=number(last.get("loss") if last else summary.get("final_loss")),
        best_eval=lowest,
        best_step=best,
        tokens_per_s=_rate(steps) if steps else number(summary.get("tokens_per_s")),
        peak_memory_bytes=_whole(last.get("memory_bytes") if last else summary.get("peak_memory_bytes")),
        changed=changed,
        age_s=max(0.0, (time.time() if now is None else now) - changed),
        problems=tuple(problems),
    )


def status_of(
    summary: Mapping[str, Any],
    events: Sequence[Mapping[str, Any]],
    *,
    running: bool | None,
    problems: Sequence[str],
) -> str:
    """Return the status of a run: running, finished, stopped, failed, killed, damaged or unknown."""
    if running:
        return "running"
    recorded = summary.get("status")
    if recorded in RECORDED:
        return str(recorded)
    if recorded is not None:
        return "damaged"
    kinds = [str(row.get("kind")) for row in events]
    ended = [kind for kind in kinds if kind in (Failed.kind, Stopped.kind)]
    if ended:
        return ended[-1]
    if problems:
        return "damaged"
    return "killed" if running is False else "unknown"


def _best(
    evaluations: Mapping[str, Any], events: Sequence[Mapping[str, Any]]
) -> tuple[int | None, float | None]:
    losses = {int(step): number(loss) for step, loss in evaluations.items() if str(step).isdecimal()}
    for row in events:
        step = _whole(row.get("step"))
        if row.get("kind") == Evaluated.kind and step is not None:
            losses[step] = number(mapping(row.get("metrics")).get("loss"))
    known = {step: loss for step, loss in losses.items() if loss is not None}
    best = best_step(known)
    return best, known[best] if best is not None else None


def _method(plan: Mapping[str, Any]) -> str:
    words = [plan.get("method"), plan.get("quantizer")]
    return " + ".join(word for word in words if isinstance(word, str) and word not in ("", "none")) or "-"


def _rate(steps: Sequence[Mapping[str, Any]]) -> float | None:
    tokens = sum(number(row.get("tokens")) or 0.0 for row in steps)
    seconds = sum(number(row.get("step_s")) or 0.0 for row in steps)
    return tokens / seconds if seconds > 0 else None


def _whole(value: Any) -> int | None:
    found = number(value)
    return None if found is None else int(found)
