"""Wire configuration, backend, engine, recipe and loop into a run."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.checkpoint.read import find_run
from crosstune.config.check_built import unbuilt_parts
from crosstune.config.plan import Plan
from crosstune.config.schema import Config
from crosstune.core.durations import parse_duration
from crosstune.core.errors import UserError, raise_all
from crosstune.core.events import Observer, Observers, Started, Warned
from crosstune.core.metric_names import check_metric_names
from crosstune.core.ranks import Group, SingleProcess
from crosstune.core.record import SilentRecord, read_log
from crosstune.core.run_lock import InUse, hold
from crosstune.distributed.group import check_shared_folder
from crosstune.distributed.restart import remember_folder
from crosstune.loop.stop import StopSignal
from crosstune.loop.train import Deadline
from crosstune.planner.gather import make_plan, may_have_several_devices, with_all_devices
from crosstune.runs.execute import Execution
from crosstune.runs.open_parts import open_session
from crosstune.runs.prepare import Ready, begin, describe, prepare
from crosstune.runs.resume import folder_of, read_request
from crosstune.tracking.observe import Tracking


@dataclass(frozen=True, kw_only=True)
class RunResult:
    folder: Path
    summary: dict[str, Any]
    failure: UserError | None = None
    """The error that ended the run early; all steps before it are kept."""


def num_processes(config: Config, *, num_local: int | None = None) -> int:
    """Return the number of processes to start on this machine; raise any problem with the plan of the run.

    `num_local` is the number that was asked for with variables instead of --world_size; -1 for one per device.
    """
    config = read_request(config, observer=Observers(), hashes=False).config
    if num_local is not None:
        config = dataclasses.replace(
            config, world_size=num_local, asked={**config.asked, "world_size": "NPROC_PER_NODE"}
        )
    if config.world_size == 1 or (config.world_size == -1 and not may_have_several_devices()):
        return 1
    plan = make_plan(with_all_devices(config))
    raise_all(unbuilt_parts(plan))
    return plan.world_size


def plan_here(config: Config) -> Plan:
    """Return the plan of a run on this machine as one process would make it, for its backend and engine."""
    return make_plan(read_request(config, observer=Observers(), hashes=False).config)


def train(
    config: Config,
    *,
    observers: Sequence[Observer] = (),
    command: Sequence[str] | None = None,
    group: Group | None = None,
    stop: StopSignal | None = None,
    tracking: Tracking | None = None,
) -> RunResult:
    """Train as configured. Problems with the request are raised before the run folder is made.

    Every process of a `group` calls this; only the first one reports and writes. A request in `stop` ends the run after
    the current step. Trackers that are given stay open for what follows the training.
    """
    if config.emulate is not None:
        raise UserError(
            "train does not emulate.", do="call crosstune.emulate.verdict.emulate, or leave out --emulate"
        )
    started = time.monotonic()
    group = group if group is not None else SingleProcess()
    screen = Observers(list(observers) if group.ranks.first else [])
    with _hold_run(config, group) as folder:
        ready = prepare(config, folder, group, screen)
        if (done := _finished(ready, group)) is not None:
            return done
        deadline = _deadline(ready.config, started)
        with Tracking() as own:
            return _execute(
                ready,
                group,
                screen,
                command=command,
                deadline=deadline,
                stop=stop or StopSignal(),
                tracking=tracking or own,
            )


@contextlib.contextmanager
def _hold_run(config: Config, group: Group) -> Iterator[Path]:
    """Choose the folder of a run and hold its lock, before anything in it is read. The first process holds it for all;
    a run without a name takes the next free one."""
    with contextlib.ExitStack() as stack:
        folder, taken = folder_of(config), list[Path]()
        while group.ranks.first:
            try:
                stack.enter_context(hold(folder))
                break
            except InUse:
                if config.name is not None or config.resume != "none":
                    raise
                taken.append(folder)
                folder = folder_of(config, taken=taken)
        folder = Path(group.share(str(folder.absolute()) if group.ranks.size > 1 else str(folder)))
        remember_folder(group, folder)
        yield folder


def _execute(
    ready: Ready,
    group: Group,
    screen: Observer,
    *,
    command: Sequence[str] | None,
    deadline: Deadline | None,
    stop: StopSignal,
    tracking: Tracking,
) -> RunResult:
    plan, recipe, folder = ready.plan, ready.recipe, ready.folder
    task = recipe.task(plan.engine)
    check_metric_names(task.metric_names, weight_name=recipe.weight_name)
    described = describe(ready, command=command)
    record = begin(ready, described, screen) if group.ranks.first else SilentRecord(folder)
    check_shared_folder(group, folder)
    if group.ranks.first:
        _start_tracking(tracking, ready, described, report=Observers([screen, record]))
    observer = Observers([record, screen, tracking])
    observer.on_event(
        Started(
            folder=str(folder),
            data=recipe.describe(),
            num_steps=recipe.num_steps(),
            processes=_processes(plan),
        )
    )
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
        deadline=deadline,
        group=group,
        stop=stop,
        tracking=tracking,
    )
    summary = execution.run()
    return RunResult(folder=record.folder, summary=summary, failure=execution.failure)


def _start_tracking(
    tracking: Tracking, ready: Ready, described: Mapping[str, Any], *, report: Observer
) -> None:
    start = ready.start
    tracking.start(
        ready.plan.config,
        described,
        folder=ready.folder,
        report=report,
        in_place=ready.in_place,
        resumes_at=start.step if start is not None else 0,
        earlier=find_run(start.checkpoint.folder) if start is not None else None,
    )


def _processes(plan: Plan) -> str:
    """Return a description of the processes of a run for the screen; an empty text for one process."""
    if plan.world_size == 1:
        return ""
    over = f" over {plan.collective}" if plan.collective else ""
    strategy = f", {plan.config.sharding_strategy}" if plan.engine == "torch" else ""
    return f"{plan.world_size} on {plan.backend.name}{over}{strategy}"


def _finished(ready: Ready, group: Group) -> RunResult | None:
    """Return the existing result if the run is finished and has no further steps."""
    folder, start = ready.folder, ready.start
    summary = read_log(folder / "summary.json") if ready.in_place and group.ranks.first else {}
    finished = start is not None and start.step >= ready.recipe.num_steps()
    if not group.any(finished and summary.get("status") == "finished"):
        return None
    return RunResult(folder=folder, summary=summary | {"status": "finished", "already_finished": True})


def _deadline(config: Config, started: float) -> Deadline | None:
    return Deadline(at=started + parse_duration(config.time_limit)) if config.time_limit else None
