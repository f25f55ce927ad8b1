"""Prepare a run: read its request, gather facts, resolve them to a plan, open the data, compare with the checkpoint,
extend the schedule.

A request is resolved three times, because the plan decides which model to fetch and how to read the data, yet depends on
the model's shape and the longest row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from crosstune.checkpoint.manifest import Manifest
from crosstune.config.load import launch_variables
from crosstune.config.options.training import AUTO
from crosstune.config.resolve.plan import Plan
from crosstune.config.resolve.resolve import resolve
from crosstune.config.schema import Config
from crosstune.config.time_limits import limit_warnings
from crosstune.core.errors import UserError
from crosstune.core.events import Event, Observer, Preparing, StepMetrics
from crosstune.core.protocols import HasLongestRows, HasPictures, Recipe
from crosstune.core.schedule import Extension
from crosstune.distributed.group import (
    check_same_everywhere,
    check_started,
    first_on_each_host,
    share_machine,
    with_world,
)
from crosstune.loop.step import rate_of_step
from crosstune.models.locate import ModelFolder
from crosstune.planner.gather import gather, model_facts, probe_for
from crosstune.process.ranks import Group
from crosstune.runs.check_request import check_base_adapter, check_model, check_request
from crosstune.runs.find_batch import find_batch_size
from crosstune.runs.open_parts import find_base
from crosstune.runs.open_recipe import open_recipe
from crosstune.runs.resume import ResumePoint, read_request
from crosstune.runs.resume_identity import identity_of


@dataclass
class BufferedEvents:
    """Show events and keep them until the run's record exists."""

    screen: Observer
    events: list[Event] = field(default_factory=list)

    def on_event(self, event: Event) -> None:
        self.events.append(event)
        self.screen.on_event(event)

    def on_step(self, metrics: StepMetrics) -> None:
        self.screen.on_step(metrics)


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """Everything known about a run before its folder is made."""

    config: Config
    """The request, completed with the run that it continues."""
    plan: Plan
    folder: Path
    model: ModelFolder | None
    """None for a recipe with its own model."""
    recipe: Recipe
    identified: Mapping[str, Any]
    point: ResumePoint | None
    """The checkpoint to continue from; None for a new run."""
    extension: Extension | None
    """The schedule from that checkpoint on, if it differs from one schedule over all steps."""
    warnings: Sequence[str]
    early: BufferedEvents

    @property
    def in_place(self) -> bool:
        """True if the run continues in its own folder."""
        return self.point is not None and self.point.is_in(self.folder)


def prepare(request: Config, folder: Path, group: Group, screen: Observer) -> PreparedRun:
    """Find the machine, checkpoint, model and data; raise any problem with them. The caller holds the lock of `folder`."""
    ranks, early = group.ranks, BufferedEvents(screen)
    group.activity.start("preparing the run")
    config, point = read_request(with_world(request, ranks), observer=early)
    machine = share_machine(group, lambda: probe_for(config))
    base = point.manifest.base_choice if point is not None else None
    facts = gather(config, machine=machine, ranks=ranks, base=base)
    plan = resolve(config, facts)  # rejects a bad request before anything is fetched
    screen.on_event(Preparing(doing="importing the engine and checking the model"))
    checked = check_request(plan, folder=folder if ranks.first else None, point=point)
    checked.raise_problems()
    check_started(plan, ranks)

    group.activity.start("finding the model and the data")
    with first_on_each_host(group):
        model = find_base(plan.config, point.checkpoint if point is not None else None, screen)
        facts = replace(facts, **model_facts(config, facts.preset))
        plan = resolve(config, facts)
        if checked.model is None and model is not None:
            check_model(plan, model, checked)
        warnings = [*checked.warnings, *(check_base_adapter(plan, model) if model is not None else [])]
        if model is not None and model.kept_tokens:
            kept = ", ".join(model.kept_tokens)
            warnings.append(f"--add_tokens adds no row for {kept[:200]}: already a token of {model.name}")
        screen.on_event(Preparing(doing="reading the data"))
        try:
            recipe = open_recipe(plan.config, model, screen)
        except UserError:  # a change of the request may have caused it
            _show(plan, screen, kinds=("change",))
            raise
    target = recipe.longest_target() if isinstance(recipe, HasLongestRows) else None
    patches = recipe.most_patches() if isinstance(recipe, HasPictures) else 0
    facts = replace(facts, longest_row=recipe.longest_row(), longest_target=target, patches=patches)
    plan = resolve(config, facts)
    recipe.configure(plan.config)
    if config.batch_size == AUTO:
        config = find_batch_size(config, plan, model=model, recipe=recipe, group=group, observer=early)
        plan = resolve(config, facts)
        recipe.configure(plan.config)
    _show(plan, screen)
    if recipe.num_steps() == 0:
        raise UserError(
            "There are no steps to run.", why="the dataset and --num_epochs give less than one step."
        )

    identified, extension = identity_of(plan, model, recipe), None
    if point is not None:
        point = point.compared(plan, identified)
        _check_not_past(point, recipe)
        warnings += _warn_of_skipped_rows(point, recipe)
        extension, told = extend(point.manifest, plan.config, num_steps=recipe.num_steps())
        warnings += told
    if ranks.size > 1:
        warnings += limit_warnings(plan.config, launch_variables())
    step = point.step if point is not None else None
    check_same_everywhere(group, {"options": plan.config.options(), **identified, "checkpoint": step})
    return PreparedRun(
        config=config,
        plan=plan,
        folder=folder,
        model=model,
        recipe=recipe,
        identified=identified,
        point=point,
        extension=extension,
        warnings=warnings,
        early=early,
    )


def _show(plan: Plan, screen: Observer, *, kinds: Sequence[str] = ()) -> None:
    for adjustment in plan.adjustments:
        if not kinds or adjustment.kind in kinds:
            screen.on_event(adjustment.to_event())


def _check_not_past(point: ResumePoint, recipe: Recipe) -> None:
    """Raise if the run already has more steps than requested."""
    if point.step > recipe.num_steps():
        raise UserError(
            f"The run is already at step {point.step}, past the requested {recipe.num_steps()} steps.",
            why="--max_steps and --num_epochs count all steps of a run, including the steps before it was resumed.",
            do=f"request more than {point.step} steps, or resume from an earlier checkpoint: --resume RUN/checkpoints/step-...",
        )


def _warn_of_skipped_rows(point: ResumePoint, recipe: Recipe) -> list[str]:
    """Return a warning if a run that ended with a short step is extended: the rows of a step depend only on its number."""
    done, now = (position.get("rows_done") for position in (point.manifest.data, recipe.position(point.step)))
    if done is None or now is None or done >= now:
        return []
    return [
        f"the last step of the run was {now - done} rows short: the same number of rows of the next epoch is skipped"
    ]


_CURVE = ("lr", "lr_scheduler", "warmup_steps", "warmup_ratio", "cosine_min_lr_ratio")
_NOTICED = 0.05
"""Smallest fraction of --lr that is reported as a jump."""


def extend(manifest: Manifest, config: Config, *, num_steps: int) -> tuple[Extension | None, list[str]]:
    """Return the schedule after the checkpoint if it differs from a single schedule over all steps, and a message about it."""
    carried = Extension.from_json(manifest.schedule.get("extended"))
    before, done = manifest.schedule.get("num_steps"), manifest.step
    if before is None or num_steps <= before or not done:
        idle = carried is None and "on_extend" in config.sources and before is not None
        return carried, [f"on_extend has no effect: the run already had {before} steps"] if idle else []
    curve = {name: manifest.options[name] for name in _CURVE if name in manifest.options}
    last = rate_of_step(done - 1, replace(config, **curve), num_steps=before, extension=carried)
    extension = None
    if config.on_extend != "stretch":
        extension = Extension(start=done, lr=last if config.on_extend == "constant" else None)
    following = rate_of_step(done, config, num_steps=num_steps, extension=extension)
    grows = f"the run grows from {before} to {num_steps} steps"
    if extension is not None and extension.lr is not None:
        return extension, [f"{grows}: the learning rate stays at {last:.3g}"]
    peak = max(
        rate_of_step(s, config, num_steps=num_steps, extension=extension) for s in _sampled(done, num_steps)
    )
    if max(abs(following - last), peak - last) < _NOTICED * config.lr:
        return extension, []
    shape = (
        f"a new {config.lr_scheduler} schedule"
        if extension
        else f"{config.lr_scheduler} over all {num_steps} steps"
    )
    told = f"{grows}: the learning rate goes from {last:.3g} to {following:.3g} at step {done + 1}"
    told += f" and up to {peak:.3g}" if peak > following else ""
    told += f" ({shape})"
    if extension is None:
        told += f"; --on_extend constant keeps {last:.3g}, --on_extend restart begins a new warm-up"
    return extension, [told]


def _sampled(first: int, end: int) -> range:
    """Return about a thousand steps, enough to find the peak of a schedule."""
    return range(first, end, max(1, (end - first) // 1000))
