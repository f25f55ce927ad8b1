"""The pipeline of a run, end to end: read the request, gather facts, resolve, open data and model, resume, train, save.

To follow `--lr`: `prepare` resolves it, `loop.step.rate_of_step` schedules it. A row: `prepare` opens the recipe,
`loop.prefetch` reads its micro-batches, `loop.step` trains on them. A checkpoint: `resume.read_request` finds it,
`Execution` restores it, `loop.save` writes the next one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from crosstune.config.load import to_yaml
from crosstune.config.option import parse_duration
from crosstune.config.recipe_spec import load_recipe
from crosstune.config.resolve.plan import Plan
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.events import Observer, Observers, RunMovedAside, Started, Warned
from crosstune.core.protocols import SkipsRows
from crosstune.core.safe_text import redact, redact_command
from crosstune.data.tokens.tokenizer import TEMPLATE_LIMIT
from crosstune.distributed.group import check_shared_folder, remember_folder
from crosstune.files.atomic_files import write_text
from crosstune.files.plain_files import read_plain_text
from crosstune.files.run_lock import InUse, hold
from crosstune.files.run_record import Record, RunRecord, is_run_folder, move_aside, read_log
from crosstune.loop.stop import StopSignal
from crosstune.models.adapter_files import keep_adapter
from crosstune.models.identity import identity
from crosstune.planner.gather import make_plan, may_have_several_devices, with_all_devices
from crosstune.process.ranks import Group, SingleProcess, check_metric_names
from crosstune.runs.execute import Execution
from crosstune.runs.prepare import PreparedRun, prepare
from crosstune.runs.resume import (
    FIRST_ADAPTER,
    KEPT_FILES,
    find_resumed_folder,
    for_record,
    inherited_options,
    names_path,
    read_request,
    run_folder,
)
from crosstune.tracking.observe import Tracking


@dataclass(frozen=True, kw_only=True)
class RunResult:
    folder: Path
    summary: dict[str, Any]
    failure: UserError | None = None
    """The error that ended the run early; all steps before it are saved."""


def train(
    config: Config,
    *,
    observers: Sequence[Observer] = (),
    command: Sequence[str] | None = None,
    group: Group | None = None,
    stop: StopSignal | None = None,
    tracking: Tracking | None = None,
) -> RunResult:
    """Train as configured. Raise problems with the request before making the run folder.

    Every rank of a `group` calls this; only rank 0 reports and writes. `stop.request` ends the run after the current
    step. A given `tracking` stays open.
    """
    if config.emulate is not None:
        raise UserError(
            "train() does not support --emulate.",
            do="call crosstune.emulate.verdict.emulate, or remove --emulate",
        )
    started = time.monotonic()
    group = group if group is not None else SingleProcess()
    screen = Observers(list(observers) if group.ranks.first else [])
    with lock_run(config, group) as folder:
        prepared = prepare(config, folder, group, screen)
        if (done := _already_finished(prepared, group)) is not None:
            return done
        limit = prepared.config.time_limit
        with Tracking() as own:
            tracking = tracking or own
            described = describe(prepared, command=command)
            record, observer = _begin(prepared, described, group=group, screen=screen, tracking=tracking)
            execution = Execution(
                prepared=prepared,
                described=described,
                record=record,
                observer=observer,
                deadline=started + parse_duration(limit) if limit else None,
                group=group,
                stop=stop or StopSignal(),
                tracking=tracking,
            )
            summary = execution.run()
        return RunResult(folder=record.folder, summary=summary, failure=execution.failure)


@contextlib.contextmanager
def lock_run(config: Config, group: Group) -> Iterator[Path]:
    """Choose the run folder and lock it before anything in it is read. Rank 0 holds the lock for all ranks.

    A run without a name gets the next free name.
    """
    with contextlib.ExitStack() as stack:
        folder, taken = choose_folder(config), list[Path]()
        while group.ranks.first:
            try:
                stack.enter_context(hold(folder))
                break
            except InUse:
                if config.name is not None or config.resume != "none":
                    raise
                taken.append(folder)
                folder = run_folder(config, taken=taken)
        folder = Path(group.broadcast(str(folder.absolute()) if group.ranks.size > 1 else str(folder)))
        remember_folder(group, folder)
        yield folder


def choose_folder(config: Config) -> Path:
    """Return the run folder of a request."""
    return find_resumed_folder(config) if names_path(config) else run_folder(config)


def _already_finished(prepared: PreparedRun, group: Group) -> RunResult | None:
    """Return the existing result if the run is finished and no further steps are requested."""
    folder, point = prepared.folder, prepared.point
    summary = read_log(folder / "summary.json") if prepared.in_place and group.ranks.first else {}
    finished = point is not None and point.step >= prepared.recipe.num_steps()
    if not group.any(finished and summary.get("status") == "finished"):
        return None
    return RunResult(folder=folder, summary=summary | {"status": "finished", "already_finished": True})


def describe(prepared: PreparedRun, *, command: Sequence[str] | None) -> dict[str, Any]:
    """Return the contents of plan.json."""
    plan, model, recipe, point = prepared.plan, prepared.model, prepared.recipe, prepared.point
    base: dict[str, Any] = {"name": plan.config.recipe, "source": "recipe"}
    if model is not None:
        base = dataclasses.asdict(model) | {"path": str(model.path), "identity": identity(model.path)}
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    words = redact_command(list(command)) if command is not None else None
    later: list[Any] = []
    if prepared.in_place:  # keep the time and the command of the first start
        first = read_log(prepared.folder / "plan.json")
        before, known = first.get("command"), first.get("later_commands")
        created, later = first.get("created", created), known if isinstance(known, list) else []
        if before and words and words not in (before, *later):
            later = [*later, words]
        words = before or words
    return plan.to_json() | {
        "name": prepared.folder.name,
        "created": created,
        "command": words,
        "later_commands": later,
        "inherited": inherited_options(prepared.config, point),
        "num_steps": recipe.num_steps(),
        "model": base,
        "data": recipe.describe(),
        "identity": prepared.identified,
        "resumed_from": point.facts() if point is not None else None,
        "warnings": list(prepared.warnings),
    }


def _begin(
    prepared: PreparedRun,
    described: Mapping[str, Any],
    *,
    group: Group,
    screen: Observer,
    tracking: Tracking,
) -> tuple[Record, Observer]:
    """Create or reopen the run folder, start the trackers, and report the start of the run."""
    plan, recipe, folder, point = prepared.plan, prepared.recipe, prepared.folder, prepared.point
    check_metric_names(recipe.task(plan.engine).metric_names, weight_name=recipe.weight_name)
    record = _open_record(prepared, described, screen) if group.ranks.first else Record(folder)
    check_shared_folder(group, folder)
    if group.ranks.first:
        tracking.start(
            plan.config,
            described,
            folder=folder,
            report=Observers([screen, record]),
            in_place=prepared.in_place,
            resumes_at=point.step if point is not None else 0,
            earlier=point.run if point is not None else None,
        )
    observer = Observers([record, screen, tracking])
    observer.on_event(
        Started(
            folder=str(folder),
            data=recipe.describe(),
            num_steps=recipe.num_steps(),
            processes=_processes(plan),
        )
    )
    for event in prepared.early.events:
        record.on_event(event)
    for sentence in prepared.warnings:
        observer.on_event(Warned(message=sentence))
    return record, observer


def _open_record(prepared: PreparedRun, described: Mapping[str, Any], screen: Observer) -> RunRecord:
    folder, point = prepared.folder, prepared.point
    config_yaml = to_yaml(for_record(prepared.config))
    if prepared.in_place:
        assert point is not None
        record = RunRecord.reopen(folder, config_yaml=config_yaml, plan=described, step=point.step)
    else:
        if is_run_folder(folder):
            screen.on_event(RunMovedAside(path=str(move_aside(folder))))
        record = RunRecord.create(folder, config_yaml=config_yaml, plan=described)
        if point is not None:
            record.prepend_metrics(point.run / "metrics.jsonl", step=point.step)
    _keep_files(folder, prepared.plan.config)
    if isinstance(prepared.recipe, SkipsRows) and (skipped := prepared.recipe.skipped_rows()):
        write_text(folder / "skipped_rows.jsonl", "".join(f"{row}\n" for row in skipped))
    for adjustment in prepared.plan.adjustments:
        record.on_event(adjustment.to_event())
    return record


def _keep_files(folder: Path, config: Config) -> None:
    """Copy the files of some options into the run, so that it can be resumed without the originals."""
    for option, name in KEPT_FILES.items():
        source, copy = Path(getattr(config, option) or "").expanduser(), folder / name
        if source.is_file() and source.resolve() != copy.resolve():
            text = read_plain_text(source, limit=TEMPLATE_LIMIT)
            copy.write_text(redact(text) if option == "mlx_config" else text, encoding="utf-8")
    first = Path(config.base_adapter or "").expanduser()
    if config.base_adapter and load_recipe(config.recipe).needs_first_weights:
        keep_adapter(first, folder / FIRST_ADAPTER)


def _processes(plan: Plan) -> str:
    """Describe the processes of a run; empty for one process."""
    if plan.world_size == 1:
        return ""
    over = f" over {plan.collective}" if plan.collective else ""
    strategy = f", {plan.config.sharding_strategy}" if plan.engine == "torch" else ""
    return f"{plan.world_size} on {plan.backend.name}{over}{strategy}"


def num_processes(config: Config, *, num_local: int | None = None) -> int:
    """Return the number of processes to start on this node; raise any problem with the plan.

    `num_local`, from the environment, overrides --world_size; -1 means one per device.
    """
    config, _ = read_request(config, observer=Observers(), hashes=False)
    if num_local is not None:
        asked = {**config.sources, "world_size": "NPROC_PER_NODE"}
        config = dataclasses.replace(config, world_size=num_local, sources=asked)
    if config.world_size == 1 or (config.world_size == -1 and not may_have_several_devices()):
        return 1
    return make_plan(with_all_devices(config)).world_size


def plan_single_process(config: Config) -> Plan:
    """Return the plan of a run as one process on this machine, to find its backend and engine."""
    return make_plan(read_request(config, observer=Observers(), hashes=False)[0])
