"""Find and check everything a run needs, and make or reopen its folder."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from crosstune.checkpoint.read import Checkpoint, find_run
from crosstune.config.load import launch_variables, to_yaml
from crosstune.config.options.training import AUTO
from crosstune.config.plan import Plan
from crosstune.config.resolve import resolve
from crosstune.config.schema import Config
from crosstune.config.time_limits import limit_warnings
from crosstune.core.errors import UserError
from crosstune.core.events import Event, Observer, RunMovedAside, StepMetrics
from crosstune.core.plain_files import read_plain_text
from crosstune.core.protocols import HasEvaluationData, HasLongestRows, Recipe
from crosstune.core.ranks import Group
from crosstune.core.record import Record, RunRecord, holds_run, move_aside, read_log
from crosstune.core.secrets import redact, redact_command
from crosstune.data.tokenizer import TEMPLATE_LIMIT
from crosstune.distributed.group import (
    check_same_everywhere,
    check_started,
    in_turn,
    share_machine,
    with_world,
)
from crosstune.models.identity import identity, source_identity
from crosstune.models.locate import ModelFolder
from crosstune.planner.gather import gather, model_facts, probe_for
from crosstune.runs import resume, same_training
from crosstune.runs.check_request import check_base_adapter, check_model, check_request
from crosstune.runs.find_batch import find_batch_size, with_stored_size
from crosstune.runs.open_parts import find_base, open_recipe
from crosstune.runs.restore_session import Start


@dataclass
class EarlyEvents:
    """Keep the events from before the record exists, to write them into it later."""

    screen: Observer
    events: list[Event] = field(default_factory=list)

    def on_event(self, event: Event) -> None:
        self.events.append(event)
        self.screen.on_event(event)

    def on_step(self, metrics: StepMetrics) -> None:
        self.screen.on_step(metrics)


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Everything found before the run folder is made."""

    config: Config
    plan: Plan
    folder: Path
    in_place: bool
    """True if the run continues in its own folder."""
    model: ModelFolder | None
    """None for a recipe that brings its own."""
    recipe: Recipe
    identified: Mapping[str, Any]
    start: Start | None
    warnings: Sequence[str]
    early: EarlyEvents


def prepare(asked: Config, folder: Path, group: Group, screen: Observer) -> Ready:
    """Find the machine, the checkpoint, the model and the data, and raise any problem with them.

    The lock of `folder` is held, so what is found there stays as it is.
    """
    ranks, early = group.ranks, EarlyEvents(screen)
    group.activity.start("preparing the run")
    request = resume.read_request(with_world(asked, ranks), observer=early)
    config, checkpoint = request.config, request.checkpoint
    if checkpoint is not None:
        config = with_stored_size(config, checkpoint.manifest)
    machine = share_machine(group, lambda: probe_for(config))
    base = same_training.recorded_base(checkpoint.manifest) if checkpoint is not None else None
    facts = gather(config, machine=machine, ranks=ranks, base=base)
    plan = resolve(config, facts)
    checked = check_request(plan, folder=folder if ranks.first else None, checkpoint=checkpoint)
    checked.raise_problems()
    check_started(plan, ranks)
    group.activity.start("finding the model and the data")
    with in_turn(group):
        model = find_base(plan.config, checkpoint, screen)
        known = dataclasses.replace(facts, **model_facts(config, facts.preset))
        if known != facts:  # the model was fetched just now
            facts, plan = known, resolve(config, known)
        if checked.model is None and model is not None:
            check_model(plan, model, checked)
        warnings = [*checked.warnings, *(check_base_adapter(plan, model) if model is not None else [])]
        with _showing_changes(plan, screen):
            recipe = open_recipe(plan.config, model, screen)
    target = recipe.longest_target() if isinstance(recipe, HasLongestRows) else None
    facts = dataclasses.replace(facts, longest_row=recipe.longest_row(), longest_target=target)
    plan = resolve(config, facts)
    recipe.configure(plan.config)
    if config.batch_size == AUTO:
        config = find_batch_size(config, plan, model=model, recipe=recipe, group=group, observer=early)
        plan = resolve(config, facts)
        recipe.configure(plan.config)
    for adjustment in plan.adjustments:
        screen.on_event(adjustment.to_event())
    if recipe.num_steps() == 0:
        raise UserError(
            "There is no step to run.", why="the data set and --num_epochs give less than one step."
        )
    identified = identity_now(plan, model, recipe)
    start = _start(plan, checkpoint, identified)
    if start is not None:
        _check_not_past(start, recipe)
        warnings = [*warnings, *_warn_of_skipped_rows(start, recipe)]
    if ranks.size > 1:
        warnings = [*warnings, *limit_warnings(plan.config, launch_variables())]
    step = start.step if start is not None else None
    check_same_everywhere(group, {"options": plan.config.options(), **identified, "checkpoint": step})
    return Ready(
        config=config,
        plan=plan,
        folder=folder,
        in_place=checkpoint is not None and resume.continues_in_place(folder, checkpoint),
        model=model,
        recipe=recipe,
        identified=identified,
        start=start,
        warnings=warnings,
        early=early,
    )


@contextlib.contextmanager
def _showing_changes(plan: Plan, screen: Observer) -> Iterator[None]:
    """Show what was changed in the request before an error that may come from it."""
    try:
        yield
    except UserError:
        for adjustment in plan.adjustments:
            if adjustment.kind == "change":
                screen.on_event(adjustment.to_event())
        raise


def describe(ready: Ready, *, command: Sequence[str] | None) -> dict[str, Any]:
    described = describe_run(
        ready.plan, folder=ready.folder, model=ready.model, recipe=ready.recipe, command=command
    )
    start = ready.start
    described |= {"identity": ready.identified, "resumed_from": start.facts() if start else None}
    described["warnings"] = list(ready.warnings)
    if ready.in_place:  # keep the time of the first process
        described["created"] = read_log(ready.folder / "plan.json").get("created", described["created"])
    return described


def begin(ready: Ready, described: Mapping[str, Any], screen: Observer) -> Record:
    """Make the run folder, or open it again."""
    folder = ready.folder
    if not ready.in_place and holds_run(folder):
        screen.on_event(RunMovedAside(path=str(move_aside(folder))))
    record = _open_record(folder, described, ready.start, config=ready.config, in_place=ready.in_place)
    _keep_files(folder, ready.plan.config)
    for adjustment in ready.plan.adjustments:
        record.on_event(adjustment.to_event())
    return record


def _open_record(
    folder: Path, described: Mapping[str, Any], start: Start | None, *, config: Config, in_place: bool
) -> RunRecord:
    kept_yaml = to_yaml(resume.for_record(config))
    if in_place:
        assert start is not None
        return RunRecord.reopen(folder, config_yaml=kept_yaml, plan=described, step=start.step)
    record = RunRecord.create(folder, config_yaml=kept_yaml, plan=described)
    if start is not None:
        record.carry_on(find_run(start.checkpoint.folder) / "metrics.jsonl", step=start.step)
    return record


def _keep_files(folder: Path, config: Config) -> None:
    """Copy the files that options name into the run, so that it can continue if they are moved."""
    for option, name in resume.KEPT_FILES.items():
        source, copy = Path(getattr(config, option) or "").expanduser(), folder / name
        if source.is_file() and source.resolve() != copy.resolve():
            text = read_plain_text(source, limit=TEMPLATE_LIMIT)
            copy.write_text(redact(text) if option == "mlx_config" else text, encoding="utf-8")


def _start(plan: Plan, checkpoint: Checkpoint | None, identified: Mapping[str, Any]) -> Start | None:
    if checkpoint is None:
        return None
    manifest = checkpoint.manifest
    measured = resume.measured_before(checkpoint)
    differences, adapted = same_training.find_differences(
        plan, manifest, identified, measured=measured is not None
    )
    same_training.check_same(differences, plan.config)
    return Start(
        checkpoint=checkpoint,
        differences=differences,
        adapted=adapted,
        changes=same_training.changed_options(manifest, plan.config),
        measured=measured,
    )


def _check_not_past(start: Start, recipe: Recipe) -> None:
    """Raise if the run has more steps already than are asked for."""
    if start.step > recipe.num_steps():
        raise UserError(
            f"The run is at step {start.step} already, past the {recipe.num_steps()} steps that are asked for.",
            why="--max_steps and --num_epochs count all steps of a run, with those before it was resumed.",
            do=f"ask for more than {start.step} steps, or resume from an earlier checkpoint: --resume RUN/checkpoints/step-...",
        )


def _warn_of_skipped_rows(start: Start, recipe: Recipe) -> list[str]:
    """Return a warning where the run ended with a short step and is made longer now: a step is a function of its number,
    so the rows that would have filled that step are not trained."""
    done = (start.checkpoint.manifest.get("data") or {}).get("rows_done")
    now = recipe.position(start.step).get("rows_done")
    if done is None or now is None or done >= now:
        return []
    return [
        f"the last step of the run had {now - done} rows less than a whole one: as many rows of the next epoch are left out"
    ]


def identity_now(plan: Plan, model: ModelFolder | None, recipe: Recipe) -> dict[str, Any]:
    """Return the identity of the training. A recipe that brings its own model is identified by its name."""
    base = {"name": plan.config.recipe, "identity": "the recipe's own"}
    if model is not None:
        source = source_identity(model.path)
        base = {
            "name": plan.config.model_name,
            "identity": source["weights"],
            "config": source["config"],
        }
    return same_training.identity_of(
        plan,
        model=base,
        data=recipe.identity(),
        eval_data=recipe.eval_identity() if isinstance(recipe, HasEvaluationData) else None,
        order=recipe.order(),
    )


def describe_run(
    plan: Plan, *, folder: Path, model: ModelFolder | None, recipe: Recipe, command: Sequence[str] | None
) -> dict[str, Any]:
    """Return the contents of plan.json."""
    described: dict[str, Any] = {"name": plan.config.recipe, "source": "recipe"}
    if model is not None:
        described = dataclasses.asdict(model) | {"path": str(model.path), "identity": identity(model.path)}
    return plan.to_json() | {
        "name": folder.name,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": redact_command(list(command)) if command is not None else None,
        "num_steps": recipe.num_steps(),
        "model": described,
        "data": recipe.describe(),
    }
