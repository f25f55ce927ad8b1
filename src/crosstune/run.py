"""The one place that wires configuration, backend, engine, recipe and loop into a run."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

from crosstune.config.load import add_environment, cache_override, to_yaml
from crosstune.config.plan import TRAIN_TYPE_PARTS, Plan
from crosstune.config.resolve import resolve
from crosstune.config.schema import Config
from crosstune.config.unbuilt import unbuilt
from crosstune.core.backend import backend_specs
from crosstune.core.errors import NonFiniteError, UserError, raise_all
from crosstune.core.machine import Machine
from crosstune.core.names import load_plugin, plugin_names
from crosstune.core.protocols import Observer, Observers, Recipe, Session
from crosstune.core.record import RunRecord, check_free, holds_run, move_aside
from crosstune.loop.stop import StopRequested, StopSignal
from crosstune.loop.train import Progress
from crosstune.loop.train import train as run_loop
from crosstune.machines import probe_machine
from crosstune.models.locate import ModelFolder, identity, locate, shape
from crosstune.models.quantized_folder import quantization_options, read_quantization

ALL_QUANTIZERS = ("bnb", "hqq", "quanto", "mlx")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    folder: Path
    summary: dict[str, Any]
    failure: NonFiniteError | None = None
    """What ended the run early, with everything up to the step before it kept."""


def make_plan(
    config: Config,
    *,
    machine: Machine | None = None,
    elsewhere: bool = False,
    longest_row: int | None = None,
) -> Plan:
    """What `train` would do with this configuration, here or (`elsewhere`) on another machine.

    Here, `auto` takes what can train today; for another machine it shows what that one is best at.
    """
    specs = backend_specs()
    config = _as_the_folder_is(config)
    preference = [name for name in specs if elsewhere or _has_session(specs[name].engine)]
    return resolve(
        config,
        machine=machine if machine is not None else _probe_for(config),
        collectives={name: spec.collective for name, spec in specs.items()},
        preference=preference,
        installs={name: spec.install for name, spec in specs.items()},
        shape=shape(config.model_name, cache=cache_override()),
        longest_row=longest_row,
    )


def train(
    config: Config, *, observers: Sequence[Observer] = (), command: Sequence[str] | None = None
) -> RunResult:
    """Train as configured. Everything that can be wrong with the request is found before the run folder is made."""
    screen = Observers(list(observers))
    plan = make_plan(config)
    raise_all(unbuilt(plan))
    folder = run_folder(config)
    if not config.overwrite:
        check_free(folder)
    model = find_model(plan.config, screen)
    plan = make_plan(config, machine=plan.machine)  # again: now the model's shape is known for certain
    recipe = open_recipe(plan.config, model, screen)
    plan = make_plan(config, machine=plan.machine, longest_row=recipe.longest_row())
    recipe.configure(plan.config)
    for adjustment in plan.adjustments:
        screen.on_event("adjustment", adjustment.to_event())
    if recipe.num_steps() == 0:
        raise UserError(
            "There is no step to run.", why="the data set and --num_epochs add up to less than one."
        )
    if holds_run(folder):
        screen.on_event("moved_aside", {"path": str(move_aside(folder))})
    described = describe_run(plan, folder=folder, model=model, recipe=recipe, command=command)
    record = RunRecord.create(folder, config_yaml=to_yaml(config), plan=described)
    observer = Observers([record, screen])
    for adjustment in plan.adjustments:
        record.on_event("adjustment", adjustment.to_event())
    observer.on_event(
        "start", {"folder": str(folder), "data": recipe.describe(), "num_steps": recipe.num_steps()}
    )
    return _run(plan, recipe, model, record=record, observer=observer)


def _run(
    plan: Plan, recipe: Recipe, model: ModelFolder, *, record: RunRecord, observer: Observer
) -> RunResult:
    """Load, train, save. Whatever ends it, what was done until then stays on record."""
    progress, stop = Progress(), StopSignal()
    extra: dict[str, Any] = {"name": record.folder.name, "backend": plan.backend.name, "engine": plan.engine}
    extra |= {"checkpoint": None, "result": None}
    started = time.perf_counter()
    failure: NonFiniteError | None = None
    try:
        with stop.listening():
            session = _load(plan, model, stop=stop, observer=observer)
            extra["trained_parameters"], extra["parameters"] = session.num_parameters()
            observer.on_event("loaded", dict(extra))
            try:
                run_loop(session, recipe, config=plan.config, observer=observer, stop=stop, progress=progress)
            except NonFiniteError as error:
                failure = error
                extra["error"] = str(error)
                observer.on_event("failed", {"error": str(error), "step": progress.steps + 1})
            if plan.config.save_model and progress.steps:
                extra["result"] = str(session.save_result(record.folder))
                observer.on_event("saved", {"path": extra["result"], "step": progress.steps})
    except StopRequested:
        progress.status = "stopped"
        observer.on_event("stopped", {"reason": stop.reason, "step": 0, "num_steps": recipe.num_steps()})
    except BaseException as error:
        progress.status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        extra["error"] = f"{type(error).__name__}: {error}"
        record.on_event(progress.status, {"error": extra["error"], "step": progress.steps})
        raise
    finally:
        extra["seconds"] = time.perf_counter() - started
        record.finish(progress.summary() | extra)
    return RunResult(folder=record.folder, summary=progress.summary() | extra, failure=failure)


def _load(plan: Plan, model: ModelFolder, *, stop: StopSignal, observer: Observer) -> Session:
    observer.on_event("loading", {"model": model.name, "path": str(model.path)})
    with stop.droppable():
        return open_session(plan, model)


def open_session(plan: Plan, model: ModelFolder, **options: Any) -> Session:
    add_environment(backend_specs()[plan.backend.name].environment)
    hub_id = model.name if model.source == "hub" else None
    return _engine(plan).open_session(plan, model_folder=model.path, base_name=hub_id, **options)


def open_recipe(config: Config, model: ModelFolder, observer: Observer) -> Recipe:
    module = load_plugin("crosstune.recipes", config.recipe, kind="recipe")
    return module.open_recipe(config, model_folder=model.path, observer=observer)


def find_model(config: Config, observer: Observer) -> ModelFolder:
    def show(stage: str, done: int, total: int | None) -> None:
        observer.on_event(
            "model_progress", {"stage": stage, "done": done, "total": total, "model": config.model_name}
        )

    return locate(config.model_name, cache=cache_override(), progress=show)


def run_folder(config: Config) -> Path:
    parent = Path(config.output_dir).expanduser()
    if config.name is None:
        stem = f"{datetime.now():%Y%m%d-%H%M%S}-{Path(config.model_name.rstrip('/')).name}"
        names = (stem if number == 1 else f"{stem}-{number}" for number in itertools.count(1))
        return next(parent / name for name in names if not (parent / name).exists())
    name = config.name
    if not name or Path(name).name != name or name in (".", ".."):
        raise UserError(
            f"'{name}' cannot be the name of a run.", do="use a plain folder name; --output_dir says where"
        )
    return parent / name


def describe_run(
    plan: Plan, *, folder: Path, model: ModelFolder, recipe: Recipe, command: Sequence[str] | None
) -> dict[str, Any]:
    """The contents of plan.json."""
    return plan.to_json() | {
        "name": folder.name,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": list(command) if command is not None else None,
        "num_steps": recipe.num_steps(),
        "model": dataclasses.asdict(model) | {"path": str(model.path), "identity": identity(model.path)},
        "data": recipe.describe(),
    }


def _engine(plan: Plan) -> ModuleType:
    if not _has_session(plan.engine):
        raise UserError(
            f"Not built yet: the {plan.engine} engine.", do="use a torch backend, such as --backend cpu"
        )
    return importlib.import_module(f"crosstune.{plan.engine}_engine.session")


def _has_session(engine: str) -> bool:
    return "session" in plugin_names(f"crosstune.{engine}_engine")


def _probe_for(config: Config) -> Machine:
    """This machine, as far as the request needs it; all of it when the backend asked for is not there."""
    quantizers = ALL_QUANTIZERS if _wants_quantizer(config) else ()
    if config.backend != "auto":
        machine = probe_machine(backends=[config.backend], quantizers=quantizers)
        if machine.available():
            return machine
    return probe_machine(quantizers=quantizers)


def _as_the_folder_is(config: Config) -> Config:
    """A folder of quantized weights says itself how they are quantized; what the user asked for stays."""
    folder = Path(config.model_name).expanduser()
    leaves_open = TRAIN_TYPE_PARTS[config.train_type][1] == "auto"
    if not leaves_open or not (folder / "config.json").is_file():
        return config
    found = read_quantization(folder)
    if found is None:
        return config
    given = {name: v for name, v in quantization_options(found.spec).items() if name not in config.asked}
    sources = {**config.asked, **dict.fromkeys(given, str(folder))}
    return dataclasses.replace(config, **given, asked=sources)


def _wants_quantizer(config: Config) -> bool:
    """Whether quantizers are worth trying, which means importing their libraries."""
    if config.optimizer.endswith("_8bit"):
        return True
    return TRAIN_TYPE_PARTS[config.train_type][1] != "none" or config.quantization_backend not in (
        "auto",
        "none",
    )
