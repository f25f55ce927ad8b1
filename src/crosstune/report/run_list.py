"""List the runs of a folder, reading little of each: there may be thousands."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.files.run_record import RUN_FILES
from crosstune.report.files import (
    RunFiles,
    is_running,
    last_change,
    last_rows,
    mapping,
    number,
    read_mapping,
    read_summary,
    rewind,
)
from crosstune.report.outcome import peak_memory, speed, status_of
from crosstune.report.series import best_evaluation, final_loss

_STEPS_BYTES = 1 << 16
_EVENTS_BYTES = 1 << 20
"""Bytes read from the end of metrics.jsonl and events.jsonl of a run without a summary."""


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
    times = (last_change(folder / name) for name in RUN_FILES)
    return max((time for time in times if time is not None), default=None)


def read_listed(folder: Path, *, changed: float) -> ListedRun:
    """Read a run for the list. `problems` lists damaged files; their values are missing."""
    problems = list[str]()
    plan = read_mapping(folder / "plan.json", problems)
    summary, running = read_summary(folder, problems), is_running(folder)
    run = RunFiles(
        folder=folder,
        plan=plan,
        summary=summary,
        metrics=[] if summary else rewind(last_rows(folder / "metrics.jsonl", limit=_STEPS_BYTES)),
        events=[] if summary else last_rows(folder / "events.jsonl", limit=_EVENTS_BYTES),
        problems=tuple(problems),
    )
    best = best_evaluation(run)
    options = mapping(plan.get("options")) or mapping(plan.get("asked"))
    method = [word for word in (plan.get("method"), plan.get("quantizer")) if isinstance(word, str)]
    peak, planned = peak_memory(run), number(plan.get("num_steps"))
    return ListedRun(
        name=folder.name,
        folder=str(folder),
        status=status_of(run, running=running),
        recipe=str(options.get("recipe") or "-"),
        model=str(mapping(plan.get("model")).get("name") or options.get("model_name") or "-"),
        method=" + ".join(word for word in method if word not in ("", "none")) or "-",
        steps=run.last_step,
        num_steps=None if planned is None else int(planned),
        loss=final_loss(run),
        best_eval=best.loss if best else None,
        best_step=int(best.step) if best else None,
        tokens_per_s=speed(run),
        peak_memory_bytes=None if peak is None else int(peak),
        changed=changed,
        age_s=max(0.0, time.time() - changed),
        problems=tuple(problems),
    )
