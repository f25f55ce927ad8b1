"""Wire configuration, backend, engine, recipe and loop into a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.config.check_built import unbuilt_parts
from crosstune.config.schema import Config
from crosstune.core.durations import parse_duration
from crosstune.core.errors import UserError, raise_all
from crosstune.core.events import Observer, Observers, Started, Warned
from crosstune.core.json_files import read_json
from crosstune.core.metric_names import check_metric_names
from crosstune.core.protocols import Recipe
from crosstune.core.ranks import Alone, Group
from crosstune.core.record import SilentRecord
from crosstune.loop.train import Deadline
from crosstune.planner.gather import make_plan
from crosstune.runs import resume
from crosstune.runs.execute import Execution, Start
from crosstune.runs.open_parts import open_session
from crosstune.runs.prepare import begin, describe, prepare


@dataclass(frozen=True, kw_only=True)
class RunResult:
    folder: Path
    summary: dict[str, Any]
    failure: UserError | None = None
    """The error that ended the run early; all steps before it are kept."""


def num_processes(config: Config) -> int:
    """Return the number of processes to start for a run; raise any problem with its plan."""
    config = resume.complete_config(config)
    if config.world_size <= 1:
        return 1
    plan = make_plan(config)
    raise_all(unbuilt_parts(plan))
    return plan.world_size


def train(
    config: Config,
    *,
    observers: Sequence[Observer] = (),
    command: Sequence[str] | None = None,
    group: Group | None = None,
) -> RunResult:
    """Train as configured. Problems with the request are raised before the run folder is made.

    Every process of a `group` calls this; only the first one reports and writes.
    """
    if config.emulate is not None:
        raise UserError(
            "train does not emulate.", do="call crosstune.emulate.verdict.emulate, or leave out --emulate"
        )
    started = time.monotonic()
    group = group if group is not None else Alone()
    ranks = group.ranks
    screen = Observers(list(observers) if ranks.first else [])
    ready = prepare(config, group, screen)
    plan, recipe, folder = ready.plan, ready.recipe, ready.folder
    done = _finished(folder, ready.start, recipe) if ready.in_place and ranks.first else None
    if group.any(done is not None):
        return done or RunResult(folder=folder, summary={"status": "finished"})
    task = recipe.task(plan.engine)
    check_metric_names(task.metric_names, weight_name=recipe.weight_name)
    described = describe(ready, command=command)
    record = begin(ready, described, screen) if ranks.first else SilentRecord(folder)
    observer = Observers([record, screen])
    observer.on_event(Started(folder=str(folder), data=recipe.describe(), num_steps=recipe.num_steps()))
    for event in ready.early.events:
        record.on_event(event)
    for sentence in ready.warnings:
        observer.on_event(Warned(message=sentence))
    execution = Execution(
        plan=plan,
        recipe=recipe,
        open_model=lambda: open_session(plan, ready.model, task=task, group=group),
        record=record,
        observer=observer,
        start=ready.start,
        described=described,
        deadline=_deadline(plan.config, started),
        group=group,
    )
    return RunResult(folder=folder, summary=execution.run(), failure=execution.failure)


def _finished(folder: Path, start: Start | None, recipe: Recipe) -> RunResult | None:
    """Return the existing result if the run is finished and has no further steps."""
    summary = read_json(folder / "summary.json")
    if start is None or summary.get("status") != "finished" or start.step < recipe.num_steps():
        return None
    return RunResult(folder=folder, summary=summary | {"already_finished": True})


def _deadline(config: Config, started: float) -> Deadline | None:
    return Deadline(at=started + parse_duration(config.time_limit)) if config.time_limit else None
